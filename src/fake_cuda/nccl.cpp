// A process group over gloo that has the name of NCCL, and refuses what NCCL refuses.
#define NDEBUG  // as torch was built
#include <torch/extension.h>
#include <set>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
using at::Tensor;
using c10d::Backend;
using Tensors = std::vector<Tensor>;
using Lists = std::vector<Tensors>;
using Handle = c10::intrusive_ptr<c10d::Work>;

// Never freed: they would be after Python's end.
static py::object &alias = *new py::object(), &on_event = *new py::object();
static void report(const char* kind, const std::string& operation, const std::string& detail = "") {
    py::gil_scoped_acquire gil;
    on_event(kind, operation, detail);
}
static void refuse(const char* kind, const std::string& operation, const std::string& why) {
    report(kind, operation, why);
    TORCH_CHECK(false, why, ": ", operation);
}
// Shape and type of the first tensor.
static std::string describe(const Tensor& t) {
    return "(" + c10::Join(", ", t.sizes()) + ") " + std::string(t.dtype().name());
}
template <class T>
static std::string describe(const std::vector<T>& all) {
    return all.empty() ? "" : describe(all[0]);
}
static const std::set<at::ScalarType> sent{
    at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kChar, at::kByte, at::kInt, at::kLong, at::kBool,
    at::kFloat8_e4m3fn, at::kFloat8_e5m2, at::kComplexFloat, at::kComplexDouble, at::kComplexHalf};

// Gloo has neither a mean nor a product with a number: it sums what was scaled by what this returns. Results
// cannot be scaled: gloo writes them again at each wait.
template <class Options>
static double as_sum(Options& options, int size) {
    double factor = 1;
    if constexpr (requires { options.reduceOp; }) {
        auto& op = options.reduceOp;
        if (op.op_ == op.AVG) factor = 1.0 / size;
        else if (op.op_ == op.PREMUL_SUM)
            factor = static_cast<c10d::NCCLPreMulSumSupplement*>(op.supplement_.get())->double_factor;
        else return factor;
        op = c10d::ReduceOp::SUM;
    }
    return factor;
}
static void scale(Tensor& tensor, double factor) { tensor = tensor.mul(factor); }
template <class T>
static void scale(std::vector<T>& all, double factor) {
    for (auto& one : all) scale(one, factor);
}

// Collectives of an output and an input, of tensors that are both, and of several outputs and inputs.
#define COLLECTIVE(NAME, OUT, IN, OPTIONS)                                    \
    Handle NAME(OUT& out, IN& in, const c10d::OPTIONS& given) override {      \
        auto options = given;                                                 \
        double factor = as_sum(options, getSize());                           \
        auto to = on_host(out, #NAME);                                        \
        auto from = on_host(in, #NAME);                                       \
        if (factor != 1) scale(from, factor);                                 \
        report("NCCL", #NAME, describe(in));                                  \
        return gloo->NAME(to, from, options);                                 \
    }
#define IN_PLACE(NAME, OPTIONS)                                               \
    Handle NAME(Tensors& tensors, const c10d::OPTIONS& given) override {      \
        auto options = given;                                                 \
        double factor = as_sum(options, getSize());                           \
        auto both = on_host(tensors, #NAME);                                  \
        bool is_exact = at::isIntegralType(both[0].scalar_type(), true);      \
        for (auto& tensor : both)                                             \
            if (factor != 1 && !is_exact) tensor.mul_(factor);                \
        report("NCCL", #NAME, describe(tensors));                             \
        auto work = gloo->NAME(both, options);                                \
        if (factor == 1 || !is_exact) return work;                            \
        work->wait();                                                         \
        for (auto& tensor : both) tensor.floor_divide_(getSize());            \
        return work;                                                          \
    }
#define EACH(NAME, OF_ONE, OPTIONS)                                           \
    Handle NAME(Tensors& out, Tensors& in, const c10d::OPTIONS& options) override { \
        Handle last;                                                          \
        for (size_t i = 0; i < out.size(); i++) {                             \
            if (last) last->wait();                                           \
            last = OF_ONE(out[i], in[i], options);                            \
        }                                                                     \
        return last;                                                          \
    }

struct FakeNccl : Backend {
    c10::intrusive_ptr<Backend> gloo;
    bool had_messages = false, had_collectives = false;

    FakeNccl(c10::intrusive_ptr<Backend> gloo, int rank, int size) : Backend(rank, size), gloo(gloo) {}
    const std::string getBackendName() const override { return "nccl"; }
    bool supportsCoalescing() const override { return false; }
    void setTimeout(std::chrono::milliseconds timeout) override { gloo->setTimeout(timeout); }
    void setSequenceNumberForGroup() override { gloo->setSequenceNumberForGroup(); }
    uint64_t getSequenceNumberForGroup() override { return gloo->getSequenceNumberForGroup(); }

    // Outside of a batch, NCCL orders messages and collectives of one eager group behind each other.
    void note_use(const std::string& operation) {
        bool was_mixed = had_messages && had_collectives;
        (operation == "send" || operation == "recv" ? had_messages : had_collectives) = true;
        if (!was_mixed && had_messages && had_collectives)
            report("NCCL_MIXED_GROUP", operation, "messages and collectives");
    }
    // What ProcessGroupNCCL checks (check_gpu_single_tensor, check_gpu_tensors_same_device; torch 2.13), also where it
    // checks nothing and sends the memory as it is (gather, scatter, reduce_scatter_tensor). Messages may be
    // transposed: both ends must be, and it warns.
    static bool is_sendable(const Tensor& t, const std::string& operation) {
        static const std::set<std::string> copied{"send", "recv", "alltoall", "allreduce_coalesced"};
        if (copied.count(operation)) return t.is_non_overlapping_and_dense();
        return t.is_contiguous(t.suggest_memory_format());
    }
    Tensor on_host(const Tensor& t, const char* operation) {
        note_use(operation);
        auto device = t.device().str(), type = std::string(t.dtype().name());
        if (!t.is_cuda()) refuse("NCCL_CPU_TENSOR", operation, "No backend type associated with device type " + device);
        if (!is_sendable(t, operation)) refuse("NCCL_NONCONTIGUOUS", operation, "Tensors must be contiguous");
        if (!sent.count(t.scalar_type()))
            refuse("NCCL_DTYPE", operation, "Input tensor data type is not supported for NCCL process group: " + type);
        py::gil_scoped_acquire gil;
        return py::cast<Tensor>(alias(t));
    }
    template <class T>
    std::vector<T> on_host(const std::vector<T>& all, const char* operation) {
        std::vector<T> aliases;
        for (auto& one : all) aliases.push_back(on_host(one, operation));
        return aliases;
    }

    COLLECTIVE(allgather, Lists, Tensors, AllgatherOptions)
    COLLECTIVE(_allgather_base, Tensor, Tensor, AllgatherOptions)
    COLLECTIVE(gather, Lists, Tensors, GatherOptions)
    COLLECTIVE(scatter, Tensors, Lists, ScatterOptions)
    COLLECTIVE(alltoall, Tensors, Tensors, AllToAllOptions)
    COLLECTIVE(reduce_scatter, Tensors, Lists, ReduceScatterOptions)
    COLLECTIVE(_reduce_scatter_base, Tensor, Tensor, ReduceScatterOptions)
    IN_PLACE(allreduce, AllreduceOptions)
    IN_PLACE(reduce, ReduceOptions)
    IN_PLACE(broadcast, BroadcastOptions)
    EACH(allgather_into_tensor_coalesced, _allgather_base, AllgatherOptions)
    EACH(reduce_scatter_tensor_coalesced, _reduce_scatter_base, ReduceScatterOptions)

    // The tensor's memory in its order, as a tensor of one dimension.
    static Tensor flat(const Tensor& t) { return t.as_strided({t.numel()}, {1}, t.storage_offset()); }
    Handle allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& given) override {
        Handle last;
        c10d::AllreduceOptions options;
        options.reduceOp = given.reduceOp;
        for (auto& tensor : tensors) {
            if (last) last->wait();
            Tensors one{tensor};
            on_host(one, "allreduce_coalesced");
            if (!tensor.is_contiguous(tensor.suggest_memory_format())) one[0] = flat(tensor);
            last = allreduce(one, options);
        }
        return last;
    }
    using Sizes = std::vector<int64_t>;
    Handle alltoall_base(Tensor& out, Tensor& in, Sizes& to_sizes, Sizes& from_sizes,
                         const c10d::AllToAllOptions& options) override {
        auto to = on_host(out, "alltoall_base"), from = on_host(in, "alltoall_base");
        report("NCCL", "alltoall_base", describe(in));
        return gloo->alltoall_base(to, from, to_sizes, from_sizes, options);
    }
    Handle send(Tensors& tensors, int rank, int tag) override {
        auto sent = on_host(tensors, "send");
        report("NCCL", "send", describe(tensors));
        return gloo->send(sent, rank, tag);
    }
    Handle recv(Tensors& tensors, int rank, int tag) override {
        auto received = on_host(tensors, "recv");
        report("NCCL", "recv", describe(tensors));
        return gloo->recv(received, rank, tag);
    }
    Handle barrier(const c10d::BarrierOptions& options) override {
        report("SYNC", "nccl barrier");
        return gloo->barrier(options);
    }
};

namespace c10d {
struct FakeTimer : Timer {
    explicit FakeTimer(c10::Device) {}
    std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, FakeTimer)
}  // namespace c10d

static c10::intrusive_ptr<FakeNccl> make(py::object store, int rank, int size, py::object given) {
    auto kind = py::module_::import("torch._C._distributed_c10d").attr("ProcessGroupGloo");
    auto options = kind.attr("_Options")();
    options.attr("_timeout") = given.attr("_timeout");
    options.attr("_devices") = std::vector<py::object>{kind.attr("create_default_device")()};
    auto gloo = py::cast<c10::intrusive_ptr<Backend>>(kind(store, rank, size, options));
    return c10::make_intrusive<FakeNccl>(gloo, rank, size);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    py::class_<FakeNccl, c10::intrusive_ptr<FakeNccl>, Backend>(m, "ProcessGroupNCCL", py::dynamic_attr())
        .def(py::init(&make));
    m.def("setup", [](py::object alias_of, py::object record) { alias = alias_of, on_event = record; });
}
