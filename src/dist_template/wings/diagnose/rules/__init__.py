"""The rules, in the order in which findings of equal level and confidence are reported."""

from . import baselines, crashes, experts, loss, overfitting, resources, utilization

ALL = (
    crashes.out_of_memory,
    crashes.crashed,
    crashes.loss_not_finite,
    loss.loss_diverges,
    loss.early_loss_jump,
    loss.loss_spikes,
    loss.loss_not_decreasing,
    loss.loss_oscillates,
    loss.labels_masked,
    baselines.no_better_than_unigram,
    baselines.too_good_to_be_true,
    overfitting.overfits,
    experts.experts_unused,
    experts.experts_overloaded,
    resources.memory_nearly_full,
    resources.memory_grows,
    utilization.gpu_utilization_low,
    resources.waits_for_data,
    resources.slow_rank,
    resources.fp32_on_gpu,
    utilization.gpu_compute_slow,
    resources.checkpoint_overhead_high,
    resources.validation_overhead_high,
)
