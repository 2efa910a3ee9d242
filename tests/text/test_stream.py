"""A streamed train split: ranks share the documents, held-out ones are skipped, and a run resumes at the next batch."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_dev.data import DataModule

from dist_template import InputError
from dist_template.text import Bytes, HubDataset, Jsonl, TextStream
from dist_template.text.batches.rows import ROWS
from dist_template.text.sources.stream import STATE, StreamedRows
from tests.support.parity import PauseAfter
from tests.support.runs import SMALL_LLAMA, Workers, newest, quiet
from tests.support.strategies import flags_of
from tests.support.tiers import tiers

NUM = 120  # documents of each data set


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two data sets of documents `<a0>` … and `<b0>` …, in three files each."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    for name in "ab":
        (tmp_path / name).mkdir()
        for shard in range(3):
            lines = [json.dumps({"text": f"<{name}{number}>"}) for number in range(shard, NUM, 3)]
            (tmp_path / name / f"{shard}.jsonl").write_text("\n".join(lines) + "\n")
    return [tmp_path / "a", tmp_path / "b"]


def module_of(folders: list[Path], rank: int = 0, ranks: int = 1, **options: Any) -> DataModule:
    stream = TextStream([HubDataset(str(folder)) for folder in folders], **options)
    data = DataModule(
        Jsonl([f"{folders[0]}/*.jsonl"]), Bytes(), 8, 4, 2, stream=stream, validation_share=0.3,
        cache_dir=str(folders[0].parent / "cache"),
    )  # fmt: skip
    data.prepare(report=quiet)
    data.rank, data.world_size = rank, ranks
    return data


def batches(data: DataModule, num: int, state: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    return [*islice(StreamedRows(data, lambda: state or {}), num)]


def documents(data: DataModule, found: list[dict[str, Any]]) -> set[str]:
    """The documents that are complete in a row."""
    rows = [row for batch in found for row in data.text_tokenizer.batch_decode(batch["input_ids"])]
    return {part for row in rows for part in row.split(data.text_tokenizer.eos_token)[1:-1]}


@pytest.mark.parametrize("stop", [1, 3, 4, 5, 11])
def test_a_stream_continues_after_any_batch(folders: list[Path], stop: int) -> None:
    """Within a block of four batches, at its end, and after the data sets' first ends."""
    data = module_of(folders, weights=[0.7, 0.3], shuffle_rows=8)
    uninterrupted = batches(data, 200)
    state = json.loads(json.dumps(uninterrupted[stop - 1][STATE]))  # plain types
    resumed = batches(module_of(folders, weights=[0.7, 0.3], shuffle_rows=8), 200 - stop, state)
    for got, expected in zip(resumed, uninterrupted[stop:], strict=True):
        assert got.keys() == expected.keys() and got[ROWS] == []
        assert all(torch.equal(got[key], expected[key]) for key in ("input_ids", "labels", "position_ids"))
    different = batches(module_of(folders, weights=[0.7, 0.3], shuffle_rows=8), 3)
    assert not torch.equal(different[0]["input_ids"], different[1]["input_ids"])


def test_ranks_share_the_documents_and_held_out_ones_are_skipped(folders: list[Path]) -> None:
    ranks = [module_of(folders[:1], rank, 3, shuffle_rows=2) for rank in range(3)]
    for data in ranks:
        data.seq_len = 64
    read = [documents(data, batches(data, 4)) for data in ranks]
    held_out = {f"<a{number}>" for number in range(NUM) if not ranks[0].is_trained_on(f"<a{number}>")}
    assert len(held_out) > 20 and not held_out & set.union(*read)
    assert all(len(own) > 10 for own in read)
    assert not read[0] & read[1] and not read[0] & read[2] and not read[1] & read[2]


def test_data_sets_give_documents_by_weight(folders: list[Path]) -> None:
    texts = module_of(folders, weights=[3, 1]).stream.documents(0, 0, 1)
    names = [record["text"][1] for record in islice(texts, 2000)]
    assert 0.7 < names.count("a") / 2000 < 0.8


def test_what_a_stream_cannot_do_is_refused(folders: list[Path], tmp_path: Path) -> None:
    data = module_of(folders)
    data.repeat_first_batch = True
    with pytest.raises(InputError, match="data.stream has no rows to choose from"):
        data.check(world_size=1)
    data.repeat_first_batch, data.num_workers = False, 2
    with pytest.raises(InputError, match="remove data.num_workers, which has no effect"):
        data.check(world_size=1)
    data.num_workers, data.source.whole = 0, True
    with pytest.raises(InputError, match="data.stream has plain text alone: remove it to train on conversations"):
        data.check(world_size=1)
    data.source.pairs = True
    with pytest.raises(InputError, match="data.stream has plain text alone: remove it to train on pairs"):
        data.check(world_size=1)
    with pytest.raises(InputError, match=r"2 datasets and weights \[1.0\]"):
        TextStream([HubDataset("a"), HubDataset("b")], [1.0])
    with pytest.raises(InputError, match="cannot be read"):
        TextStream([HubDataset(str(tmp_path / "nothing"))]).documents(0, 0, 1)
    with pytest.raises(InputError, match="cannot be read.*text"):
        batches(module_of([folders[0], number_file(tmp_path)]), 1)


def number_file(folder: Path) -> Path:
    (folder / "numbers").mkdir()
    (folder / "numbers" / "0.jsonl").write_text('{"number": 3}\n')
    return folder / "numbers"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers(["ddp", "fsdp2", "zero2"], daily=["fsdp2"]))
def test_two_processes_stop_and_resume_with_the_losses_of_an_uninterrupted_run(
    folders: list[Path], tmp_path: Path, strategy: str
) -> None:
    stream = {"datasets": [{"name": str(folder)} for folder in folders], "weights": [1, 2], "shuffle_rows": 4}
    flags = [
        "fit", f"--run.root={tmp_path / 'runs'}", "--run.report=false", "--data.tokenizer=Bytes", "--data.seq_len=8",
        "--data.source=Jsonl", f"--data.source.paths=[{folders[0]}/*.jsonl]", "--data.validation_share=0.3",
        f"--data.stream={json.dumps({'class_path': 'TextStream', 'init_args': stream})}",
        f"--data.cache_dir={tmp_path / 'cache'}", "--data.global_batch_size=8", "--data.micro_batch_size=2",
        f"--model.architecture={SMALL_LLAMA}", "--model.optim.warmup=1", "--trainer.accelerator=cpu",
        "--trainer.max_steps=8", "--trainer.log_every_n_steps=1", "--trainer.val_check_interval=4",
        "--model.sample_tokens=2", "--trainer.logger=false",
    ]  # fmt: skip
    two = [*flags_of(strategy), "--trainer.devices=2"]
    with Workers(2) as workers:
        module_of(folders[:1])  # makes the cache of another seq_len: tokens do not depend on it
        full = workers.run([*flags, *two, "--run.name=full"], tmp_path / "full").check()
        first = workers.run([*flags, *two, "--run.name=cut"], tmp_path / "first", callbacks=[PauseAfter(3)]).check()
        resume = f"--ckpt_path={newest(first.run)}"
        rest = workers.run([*flags, *two, "--run.name=cut", resume], tmp_path / "rest").check()
    assert list(full.loss) == [*range(1, 9)] and len({*full.loss.values()}) == 8
    assert first.loss | rest.loss == pytest.approx(full.loss, rel=1e-6)
    with Workers(1) as workers:
        record = workers.run([*flags, "--trainer.devices=1", resume], tmp_path / "alone")
        assert "state of 2 ranks, and there are 1" in str(record.error)


def test_a_stream_without_a_usable_document_ends_in_a_sentence(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data sets are repeated, so it would otherwise read forever."""
    monkeypatch.setattr("dist_template.text.sources.stream.MOST_EMPTY", 500)
    data = module_of(folders)
    for folder in folders:
        for file in folder.glob("*.jsonl"):
            file.write_text('{"text": " "}\n' * 40)
    with pytest.raises(InputError, match="documents in a row are empty or held out"):
        batches(data, 1)


def test_a_stream_resumes_with_the_sizes_of_before_only(folders: list[Path]) -> None:
    data = module_of(folders, shuffle_rows=8)
    state = batches(data, 1)[0][STATE]
    data.micro_batch_size = 4
    with pytest.raises(InputError, match="data.micro_batch_size"):
        batches(data, 1, state)
