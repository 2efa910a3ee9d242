"""What transformers' plans say of a mesh: which modules are sharded, and how. No torch."""

from collections.abc import Iterator, Mapping

from ..configured import ARGS, NOT_READ_YET, Configured

QUERIES = ("q_proj", "q_b_proj", "qkv_proj", "query_key_value")  # whose columns are heads
EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")


def experts_of(config: object) -> tuple[str, int]:
    """Returns the field with the number of experts, and the number; 0 if there are none."""
    for name in EXPERTS:
        if isinstance(number := getattr(config, name, None), int):
            return name, number
    return EXPERTS[0], 0


def shards_heads(plan: Mapping[str, str]) -> bool:
    return any(rule.endswith(QUERIES) and style == "colwise" for rule, style in plan.items())


def plan_of(setup: Configured, kind: str, given: Mapping[str, str] | None) -> dict[str, str]:
    """Returns the model's rules, overridden by the user's; {} as tp_plan means none."""
    if setup.text_config is None or (kind == "tp" and given == {}):
        return {}
    name = f"base_model_{kind}_plan"
    rules = getattr(setup.model_config, name, None) or getattr(setup.text_config, name, None)
    return {**(rules or {}), **(given or {})}


def without_plan(setup: Configured, kind: str, size: int, what: str) -> Iterator[str]:
    """Tensor and expert parallelism need a plan that says how each module is sharded."""
    if setup.model_config is not NOT_READ_YET:
        of_type = getattr(setup.model_config, "model_type", "another library")
        no_plan = f"a model of {of_type} has no plan for {what} parallelism"
        yield (
            f"{kind}_size {size}: {no_plan}; set {ARGS}.{kind}_size to 1, or give rules as"
            f" {ARGS}.{kind}_plan"
        )
