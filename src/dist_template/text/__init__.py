"""Language models: where text comes from, how it becomes batches, and the module that is trained on
them.

    sources.py, tokenizers.py     documents; text to token ids
    chat.py, chat_template.py     conversations; mixture.py: several sources with weights
    stream.py                     a train split that is tokenized while training
    preferences.py                pairs; preference_loss.py: DPO
    build.py, cache.py            the token cache
    order.py, rows.py, loader.py  batches; packing.py: rows of whole documents
    prepared.py, datamodule.py    PackedText: from a source of documents to batches
    module.py                     TextModule: loss, evaluation and generation

Names are imported when they are first used.
"""

from __future__ import annotations

from ..lazy import attribute_of

PLACES = {  # public name -> the module of this library that defines it
    "TextModule": "text.module",
    "PackedText": "text.datamodule",
    "Source": "text.sources",
    "StandardLibrary": "text.sources",
    "TextFiles": "text.sources",
    "Jsonl": "text.sources",
    "Parquet": "text.sources",
    "HubDataset": "text.sources",
    "Chat": "text.chat",
    "Mixture": "text.mixture",
    "TextStream": "text.stream",
    "Preferences": "text.preferences",
    "TokenizerSpec": "text.tokenizers",
    "Bytes": "text.tokenizers",
    "ByteBPE": "text.tokenizers",
    "Pretrained": "text.tokenizers",
    "Attention": "model.kernels",
    "known_documents": "model.kernels",
    "causal_lm": "model.causal_lm",
    "causal_lm_config": "model.causal_lm",
}

__all__ = [*PLACES]  # noqa: PLE0604  (lazy)
__getattr__ = attribute_of(__name__, PLACES)
