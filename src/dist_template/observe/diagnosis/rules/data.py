"""What the data are, as they were looked at once (facts.json) and as training sees them."""

from __future__ import annotations

from collections.abc import Iterator

from ...history.run import History
from .. import expected, robust
from ..engine import rule
from ..finding import Cause, Change, Finding

FEW_COUNT = 0.05  # of the labels; instruction data with long prompts have a tenth and more
CONSTANT = 0.02  # of a micro-batch's tokens are distinct, at most
FEW_DISTINCT = 4  # token ids
DUPLICATES = 0.01  # of the validation split: above it the validation loss no longer tells about unseen text
UNSHIFTED = 0.8  # of the labels; text repeats a token at once in a tenth of its places at most
SEEN = 4.0  # epochs, up to which repeated text is as good as new (Muennighoff et al., arXiv:2305.16264)


@rule
def labels_masked(history: History) -> Iterator[Finding]:
    counted = history.metrics["data/counted_share"].finite()
    share = robust.median(counted.values) if len(counted) else history.fact("data.counted_share")
    loss = history.metrics["train/loss"].finite()
    if share is None and len(loss) >= 3 and robust.median(abs(loss.values)) == 0:
        share = 0.0  # a loss that is exactly 0 is a sum over no label
    if share is None or share >= FEW_COUNT:
        return
    nothing = share == 0
    yield Finding(
        "labels_masked", "error" if nothing else "warning", "certain" if nothing else "likely",
        "no label counts" if nothing else "few labels count",
        f"{share:.2%} of the labels are not -100" + (f"; train/loss is {loss.last:.4g}." if len(loss) else "."),
        [
            Cause("The mask covers the answers too: labels are set to -100 where they should not be (data.py)."),
            Cause("The template's markers were not found in the text, so that all of it counts as the prompt."),
            Cause("seq_len cuts the answers off.", _longer(history)),
        ],
        steps=robust.span(counted) if len(counted) else None,
        explains=("gradient_is_zero", "loss_stands_still", "loss_too_good", "clips_most_steps", "loss_oscillates"),
    )  # fmt: skip


def _longer(history: History) -> list[Change]:
    length = history.key("data.seq_len")
    return [Change("data.seq_len", length, 2 * length)] if length else []


@rule
def data_is_constant(history: History) -> Iterator[Finding]:
    shares = history.metrics["data/distinct_token_share"].finite()
    distinct = history.fact("data.distinct_tokens")
    share = robust.median(shares.values) if len(shares) else None
    size = (history.key("data.micro_batch_size") or 0) * (history.key("data.seq_len") or 0)
    seen = share * size if share is not None and size else None
    few = (distinct is not None and distinct <= FEW_DISTINCT) or (seen is not None and seen <= FEW_DISTINCT)
    if not few or (seen is not None and seen > FEW_DISTINCT and (distinct or 0) > FEW_DISTINCT):
        return
    told = f"{distinct} different tokens in the rows that were looked at" if distinct is not None else ""
    told = told or f"{seen:.0f} different tokens in a micro-batch of {size}"
    yield Finding(
        "data_is_constant", "error", "certain", "the data say the same again and again",
        f"There are {told}.",
        [
            Cause("The source yields one text, or the tokenizer turns everything into one token (<unk>)."),
            Cause("Rows are filled with padding."),
        ],
        explains=("duplicates_across_splits", "loss_too_good", "loss_stands_still", "seen_too_often"),
    )  # fmt: skip


@rule
def duplicates_across_splits(history: History) -> Iterator[Finding]:
    share = history.fact("data.duplicate_share")
    if not share or share <= DUPLICATES:
        return
    yield Finding(
        "duplicates_across_splits", "error" if share > 0.5 else "warning", "certain",
        "the validation split has text of the train split",
        f"{share:.1%} of the validation split's rows that were looked at stand in the train split as well.",
        [
            Cause(
                "Documents were split after they had been cut or copied: equal documents go to one split, overlapping "
                "ones do not. Remove near-duplicates before `prepare`."
            )
        ],
        explains=("loss_too_good",),
    )  # fmt: skip


@rule
def labels_not_shifted(history: History) -> Iterator[Finding]:
    """The model is asked for the token that it is given."""
    share = history.fact("data.unshifted_share")
    if not share or share < UNSHIFTED:
        return
    yield Finding(
        "labels_not_shifted", "error", "certain", "labels repeat the inputs",
        f"{share:.0%} of the labels are the input token at the same place: nothing is predicted, and the loss tells "
        "nothing.",
        [Cause("Labels must be the inputs moved by one: labels[:, t] = tokens[:, t + 1] (text/rows.py).")],
        explains=("loss_too_good",),
    )  # fmt: skip


@rule
def chat_template_missing(history: History) -> Iterator[Finding]:
    """The tokenizer knows how a conversation is written, and the text is not written so."""
    if history.fact("data.chat_share") != 0:
        return
    yield Finding(
        "chat_template_missing", "info" if expected.is_from_scratch(history) else "warning", "possible",
        "the chat template is not applied",
        "The tokenizer has a chat template, and 0 % of the rows that were looked at have any of its markers.",
        [Cause("Messages went in as plain text: write each document with tokenizer.apply_chat_template.")],
    )  # fmt: skip


@rule
def seen_too_often(history: History) -> Iterator[Finding]:
    tokens, size = history.metrics["train/tokens"].finite(), history.fact("data.train_tokens")
    times = expected.epochs(history)
    if times is None or times <= SEEN or history.key("data.repeat_first_batch"):
        return
    yield Finding(
        "seen_too_often", "info", "certain", "the data have been seen many times",
        f"{tokens.last:,.0f} tokens were trained on, of a split of {size:,}: {times:.1f} times.",
        [Cause("There is too little text for so many steps: beyond 4 times it gives less and less than new text.")],
    )  # fmt: skip
