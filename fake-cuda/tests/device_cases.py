"""What the device must report of plain torch code: `python device_cases.py` prints it as JSON.

Each function that is marked with `reports` is a case: its line that ends in `# here` must be named,
by an event of this kind and operation; without such a line nothing but kernels and copies from
pinned memory may be reported."""

import inspect
import json
import sys
from collections.abc import Callable
from types import FunctionType

import fake_cuda

fake_cuda.install(gpus=2)

import torch  # noqa: E402
from torch import nn  # noqa: E402

CASES: dict[str, tuple[FunctionType, str, str]] = {}


def reports(kind: str, operation: str = "") -> Callable:
    def keep(case: FunctionType) -> FunctionType:
        CASES[case.__name__] = (case, kind, operation)
        return case

    return keep


def on_device(*size: int) -> torch.Tensor:
    return torch.zeros(*size, device="cuda")


@reports("SYNC", "aten::_local_scalar_dense")
def item() -> None:
    on_device(1).item()  # here


@reports("SYNC", "aten::_local_scalar_dense")
def branch() -> None:
    if on_device(1) > 0:  # here
        pass


@reports("SYNC", "aten::nonzero")
def mask_as_an_index() -> None:
    values = on_device(3)
    values[values > 0]  # here


@reports("SYNC", "D2H blocking copy")
def copy_to_the_host() -> None:
    on_device(3).cpu()  # here


@reports("SYNC", "H2D blocking copy")
def copy_from_the_host() -> None:
    torch.tensor([1.0, 2.0], device="cuda")  # here


@reports("SYNC", "torch.cuda.synchronize")
def synchronize() -> None:
    torch.cuda.synchronize()  # here


@reports("EVENT_WAIT", "Event.synchronize")
def wait_for_an_event() -> None:
    event = torch.cuda.Event()
    event.record()
    event.synchronize()  # here


@reports("H2D_PAGEABLE")
def copy_of_pageable_memory() -> None:
    torch.zeros(3).to("cuda", non_blocking=True)  # here


@reports("H2D_PINNED")
def copy_of_pinned_memory() -> None:
    torch.zeros(3).pin_memory().to("cuda", non_blocking=True)  # here


@reports("EARLY_READ")
def read_before_the_copy_has_arrived() -> None:
    host = torch.empty(3, pin_memory=True)
    host.copy_(on_device(3), non_blocking=True)
    host.sum()  # here
    torch.cuda.synchronize()
    assert host.sum() == 0


@reports("RACE_H2D")
def written_while_it_is_copied() -> None:
    host = torch.zeros(3).pin_memory()
    host.to("cuda", non_blocking=True)  # here
    host.fill_(1)
    torch.cuda.synchronize()


@reports("KERNEL", "aten::mul")
def kernel() -> None:
    on_device(3) * 2  # here


@reports("MIX", "aten::add.Tensor")
def two_devices() -> None:
    one, other = on_device(3), torch.zeros(3, device="cuda:1")
    try:
        one + other  # here
    except RuntimeError as error:
        assert "Expected all tensors to be on the same device" in str(error)
    else:
        raise AssertionError("not refused")


@reports("BAD_GENERATOR")
def generator_of_the_host() -> None:
    generator = torch.Generator()
    try:
        torch.randn(3, device="cuda", generator=generator)  # here
    except RuntimeError as error:
        assert "Expected a 'cuda' device type for generator" in str(error)
    else:
        raise AssertionError("not refused")


@reports("KERNEL")
def a_training_step_that_waits_for_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batches = [torch.ones(2, 4).pin_memory() for _ in range(2)]
    for number, batch in enumerate(batches):
        if number:
            fake_cuda.clear_events()
        model(batch.to("cuda", non_blocking=True)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@reports("KERNEL")
def values_equal_the_cpus() -> None:
    torch.manual_seed(0)
    model, batch = nn.Linear(4, 4), torch.randn(2, 4)
    expected = model(batch)
    on_gpu = nn.Linear(4, 4).to("cuda")
    on_gpu.load_state_dict(model.state_dict())
    torch.testing.assert_close(on_gpu(batch.to("cuda")).cpu(), expected)
    fake_cuda.clear_events()


@reports("KERNEL")
def memory_that_nothing_wrote_is_not_a_number() -> None:
    fresh = torch.empty(3, device="cuda")
    assert fresh.isnan().all().cpu()
    assert torch.cuda.memory_allocated() > 0
    fake_cuda.clear_events()


def named_line(case: FunctionType) -> int:
    """Returns the number of the line that ends in `# here`; 0 without one."""
    lines, first = inspect.getsourcelines(case)
    numbers = [first + i for i, line in enumerate(lines) if line.rstrip().endswith("# here")]
    return numbers[0] if numbers else 0


def main() -> None:
    assert torch.cuda.is_available() and torch.cuda.device_count() == 2
    found = {}
    for name, (case, kind, operation) in CASES.items():
        fake_cuda.clear_events()
        case()
        events = [event._asdict() for event in fake_cuda.events()]
        found[name] = {
            "kind": kind,
            "operation": operation,
            "line": named_line(case),
            "events": events,
        }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
