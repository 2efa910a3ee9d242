"""The rules, in the order in which findings of equal level and confidence are reported."""

from . import crashes, data, experts, loss, overhead, resources

ALL = (
    crashes.out_of_memory, crashes.crashed, crashes.loss_not_finite,
    loss.loss_diverges, loss.early_loss_jump, loss.loss_spikes, loss.loss_not_decreasing,
    loss.gradient_zero, loss.gradient_explodes,
    data.labels_masked, data.labels_not_shifted, data.data_constant,
    data.train_validation_overlap, data.overfits,
    experts.experts_unused, experts.experts_overloaded,
    resources.memory_nearly_full, resources.memory_grows, resources.waits_for_data,
    resources.pipeline_waits, resources.uneven_stages,
    resources.slow_rank, resources.fp32_on_gpu,
    overhead.checkpoint_overhead_high, overhead.validation_overhead_high,
    overhead.time_limit_too_short,
)  # fmt: skip
