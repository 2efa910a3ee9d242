"""Language models of transformers: output layer and loss, kernels, adapters, quantization."""
