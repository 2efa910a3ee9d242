"""Language models: where text comes from, how it becomes batches, and the module that is trained on
them.

    sources/          documents, conversations, pairs; several with weights
    tokenizers.py     text to token ids
    model/            output layer and loss in chunks, kernels, adapters, quantization
    cache/            tokens on disk
    batches/          rows, packing, the loader
    datamodule.py     PackedText: from a source of documents to batches
    objectives/       what is learned: the next token, later ones, a teacher, pairs, rewards
    module.py         TextModule: adapters, evaluation, generation

Names are imported when they are first used."""

from ..lazy import attribute_of

PLACES = {  # public name -> the module of this library that defines it
    "TextModule": "text.module",
    "Objective": "text.objectives.objective",
    "NextToken": "text.objectives.next_token",
    "Pairs": "text.objectives.pairs",
    "PackedText": "text.datamodule",
    "Source": "text.sources.documents",
    "StandardLibrary": "text.sources.documents",
    "TextFiles": "text.sources.documents",
    "Jsonl": "text.sources.documents",
    "Parquet": "text.sources.documents",
    "HubDataset": "text.sources.documents",
    "Chat": "text.sources.chat",
    "Mixture": "text.sources.mixture",
    "Preferences": "text.sources.chat",
    "Ratings": "text.sources.chat",
    "TokenizerSpec": "text.tokenizers",
    "Bytes": "text.tokenizers",
    "ByteBPE": "text.tokenizers",
    "Pretrained": "text.tokenizers",
    "Attention": "text.model.kernels",
    "known_documents": "text.model.kernels",
    "causal_lm": "text.model.causal_lm",
    "causal_lm_config": "text.model.causal_lm",
}

__all__ = [*PLACES]  # noqa: PLE0604  (lazy)
__getattr__ = attribute_of(__name__, PLACES)
