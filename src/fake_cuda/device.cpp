// A CUDA device made of host memory: real values, device type "cuda". Operations run the CPU's kernels on aliases.
#define NDEBUG  // as torch was built: its structures have other members without it
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/library.h>
#include <set>
#include "memory.hpp"
using c10::DispatchKey;
using c10::IValue;
using Arguments = ArrayRef<IValue>;
using Names = std::set<std::string>;
static bool reports_kernels = true;
static Names& checked_exactly = *new Names();  // operations whose tensors CUDA's wrappers want on one device
static const Names not_checked{"aten::copy_", "aten::fill_", "aten::_foreach_copy_", "aten::record_stream", "aten::set_"};
static const Names reads_result{"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal",
                                "aten::_unique", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
                                "aten::bincount", "aten::repeat_interleave", "aten::_linalg_eigh"};

template <class F>
static void each_tensor(const IValue& value, F visit) {
    if (value.isTensor()) visit(value.toTensor());
    if (value.isTensorList())
        for (const Tensor& t : value.toTensorVector()) visit(t);
    if (value.isOptionalTensorList())
        for (const std::optional<Tensor>& t : value.toOptionalTensorVector()) visit(t.value_or(Tensor()));
}
template <class F>
static void replace_tensors(IValue& value, F replacement) {
    if (value.isTensor()) {
        value = replacement(value.toTensor());
    } else if (value.isTensorList()) {
        std::vector<Tensor> all;
        for (const Tensor& t : value.toTensorVector()) all.push_back(replacement(t));
        value = all;
    } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> all;
        for (auto& t : value.toOptionalTensorVector()) all.push_back(t ? std::optional(replacement(*t)) : t);
        value = all;
    }
}
static bool is_on(const Tensor& t, c10::DeviceType type) { return t.defined() && t.device().type() == type; }
static bool is_mask(const Tensor& t) { return t.defined() && (t.scalar_type() == kBool || t.scalar_type() == kByte); }

// ---- what a CUDA device refuses
static void refuse(const char* kind, const std::string& operation, const std::string& detail, const std::string& why) {
    report(kind, operation, detail);
    TORCH_CHECK(false, why, ": ", operation);
}
static void check_device(const c10::Argument& argument, const Tensor& t, Device device, bool is_exact,
                         const std::string& operation) {
    bool is_written = argument.alias_info() && argument.alias_info()->isWrite();
    bool is_scalar = t.dim() == 0 && t.is_cpu() && !is_written;  // which a kernel takes as its argument
    if (t.device() == device || t.is_meta() || t.unsafeGetTensorImpl()->is_wrapped_number()) return;
    if (is_scalar && !is_exact) return;
    std::string what = argument.name() + " " + describe(t);
    refuse("MIX", operation, what,
           "Expected all tensors to be on the same device, but " + what + " is on " + t.device().str() +
               " and the others are on " + device.str());
}
static void check(const c10::OperatorHandle& op, Arguments values) {
    auto& schema = op.schema();
    auto& name = schema.name();
    auto operation = toString(schema.operator_name());
    if (not_checked.count(name) || name.rfind("aten::_foreach_", 0) == 0) return;  // lists may have several devices
    std::optional<Device> device;
    for (auto& value : values) {
        each_tensor(value, [&](const Tensor& t) { device = device || !is_on(t, kCUDA) ? device : t.device(); });
        if (value.isDevice() && value.toDevice().is_cuda() && !device) device = gpu(value.toDevice().index());
    }
    if (!device) return;
    bool is_exact = checked_exactly.count(operation);
    for (size_t i = 0; i < values.size(); i++) {
        bool is_index = values[i].isOptionalTensorList() && is_on(values[0].toTensor(), kCUDA);
        each_tensor(values[i], [&](const Tensor& t) {
            if (t.defined() && !(is_index && t.is_cpu()))
                check_device(schema.arguments()[i], t, *device, is_exact, operation);
        });
        if (values[i].isGenerator() && values[i].toGenerator().device().is_cpu())
            refuse("BAD_GENERATOR", operation, "a generator of the host",
                   "Expected a 'cuda' device type for generator but found 'cpu'");
    }
}

// ---- what a CUDA device makes the host wait for
static void report_index_put(Arguments values, const std::string& name) {
    bool has_mask = false, has_host_index = false;
    each_tensor(values[1], [&](const Tensor& t) {
        has_mask |= is_mask(t) && is_on(t, kCUDA);
        has_host_index |= is_on(t, kCPU);
    });
    auto value = values[2].toTensor();
    if (has_mask && !(value.numel() == 1 && value.is_cpu())) report("SYNC", name + " (mask)");  // else masked_fill_
    if (has_host_index) report("SYNC", name + " (index on the host)");
}
static void report_waits(const c10::FunctionSchema& schema, Arguments values) {
    auto& name = schema.name();
    if (name == "aten::_index_put_impl_") report_index_put(values, name);
    if (name == "aten::_grouped_mm" && values[0].toTensor().scalar_type() != kBFloat16)
        report("FP32", name, describe(values[0].toTensor()));  // for which torch reads its offsets on the host
    if (!reads_result.count(name)) return;
    bool has_size = name == "aten::repeat_interleave" && !values.back().isNone();
    if (!has_size) wait("SYNC", name.c_str());
}

static void report_kernel(const c10::FunctionSchema& schema, Arguments values) {
    if (!reports_kernels || reads_result.count(schema.name())) return;
    std::string what;  // the first tensor
    for (auto& value : values)
        each_tensor(value, [&](const Tensor& t) {
            if (what.empty() && t.defined()) what = describe(t);
        });
    report("KERNEL", schema.name(), what);
}

// ---- operations
static Tensor& set_at(Tensor& self, Storage storage, int64_t offset, IntArrayRef size, IntArrayRef strides) {
    auto* changed = self.unsafeGetTensorImpl();
    changed->set_storage_keep_dtype(std::move(storage));
    changed->set_storage_offset(offset);
    if (strides.size() == size.size()) changed->set_sizes_and_strides(size, strides);
    else changed->set_sizes_contiguous(size);
    return self;
}
static void compute(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    auto& schema = op.schema();
    auto first = stack->size() - schema.arguments().size();
    Arguments values(stack->data() + first, schema.arguments().size());
    check(op, values);
    report_waits(schema, values);
    report_kernel(schema, values);
    std::vector<std::pair<Tensor, Tensor>> aliases;  // on the host, of the device
    std::vector<std::pair<Generator, Generator>> generators;
    Device device = kCPU;  // of the results
    auto to_host = [&](const Tensor& t) -> Tensor {
        if (!is_on(t, kCUDA)) return t;
        if (device.is_cpu()) device = t.device();
        for (auto& [host, original] : aliases)
            if (original.is_same(t)) return host;
        return aliases.emplace_back(on_host(t), t).first;
    };
    for (size_t i = first; i < stack->size(); i++) {
        auto& value = (*stack)[i];
        replace_tensors(value, to_host);
        if (value.isDevice() && value.toDevice().is_cuda()) {
            device = gpu(value.toDevice().index());
            value = Device(kCPU);
        } else if (value.isGenerator() && value.toGenerator().device().is_cuda()) {
            auto twin = at::detail::createCPUGenerator();
            twin.set_state(value.toGenerator().get_state());
            generators.emplace_back(twin, value.toGenerator());
            value = twin;
        }
    }
    std::vector<std::vector<int64_t>> sizes;
    for (auto& [host, _] : aliases) sizes.push_back(host.sizes().vec());
    op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), stack);
    for (auto& [twin, original] : generators) original.set_state(twin.get_state());
    for (size_t i = 0; i < aliases.size(); i++) {
        auto& [host, original] = aliases[i];
        if (host.sizes() == IntArrayRef(sizes[i])) continue;  // else an `out` that was resized
        auto made = alias(host, original.device());
        set_at(original, made.storage(), made.storage_offset(), made.sizes(), made.strides());
    }
    auto to_device = [&](const Tensor& t) -> Tensor {
        if (!is_on(t, kCPU)) return t;
        for (auto& [host, original] : aliases)
            if (host.is_same(t)) return original;
        for (auto& [host, original] : aliases)
            if (host.has_storage() && t.storage().is_alias_of(host.storage()))
                return tensor_over(original.storage(), DispatchKey::CUDA, t);
        return device.is_cuda() ? alias(t, device) : t;
    };
    for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++)
        replace_tensors((*stack)[i], to_device);
}

// Torch computes an operation's result by its `out` variant, after it has made `out`; before that, what is refused.
static void check_first(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    auto num = op.schema().arguments().size();
    check(op, Arguments(stack->data() + stack->size() - num, num));
    op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::HPU), stack);  // no kernels are here: torch's general one
}

using GivenType = std::optional<ScalarType>;
using GivenDevice = std::optional<Device>;
static const c10::DispatchKeySet key(DispatchKey::CUDA);
static Tensor make_empty(IntArrayRef size, GivenType type, std::optional<Layout>, GivenDevice on, std::optional<bool>,
                         std::optional<MemoryFormat> format) {
    c10::DeviceGuard set(on.value_or(gpu()));
    return at::detail::empty_generic(size, &device_memory, key, dtype_or_default(type), format);
}
static Tensor make_strided(IntArrayRef size, IntArrayRef strides, GivenType type, std::optional<Layout>, GivenDevice on,
                           std::optional<bool>) {
    c10::DeviceGuard set(on.value_or(gpu()));
    return at::detail::empty_strided_generic(size, strides, &device_memory, key, dtype_or_default(type));
}
static Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
    auto to = is_on(self, kCUDA) ? on_host(self) : self, from = is_on(source, kCUDA) ? on_host(source) : source;
    c10::impl::ExcludeDispatchKeyGuard no_gradients(c10::autograd_dispatch_keyset);
    auto what = describe(source);
    bool between_devices = self.is_cuda() == source.is_cuda(), to_device = self.is_cuda();
    bool is_fast = is_pinned((to_device ? source : self).storage().data());
    if (between_devices || !self.numel()) {
        if (reports_kernels) report("KERNEL", "aten::copy_", what);
        to.copy_(from);
    } else if (!non_blocking || (!is_fast && !to_device)) {
        std::string kind = non_blocking ? "copy to pageable memory" : "blocking copy";
        report("SYNC", (to_device ? "H2D " : "D2H ") + kind, what);
        flush();
        to.copy_(from);
    } else if (to_device) {
        if (is_pending(source)) flush();  // the device copies in order
        if (!is_fast) report("H2D_PAGEABLE", "H2D from pageable memory", what);
        to.copy_(from);
        if (!is_fast) return self;
        auto values = source.clone();
        auto where = report("H2D_PINNED", "H2D from pinned memory", what);
        std::lock_guard<std::mutex> lock(mu);
        sources.push_back({source, values, where});
    } else {
        auto values = from.clone();
        report("D2H_PINNED", "D2H to pinned memory", what);
        watch_reads(true);
        std::lock_guard<std::mutex> lock(mu);
        pending.push_back({self, values, what});
    }
    return self;
}
static void resize_storage(const Storage& storage, int64_t size) {
    c10::DeviceGuard set(storage.device());
    auto fresh = device_memory.allocate(size);
    if (auto kept = std::min<int64_t>(size, storage.nbytes())) memcpy(fresh.get(), storage.data(), kept);
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.set_nbytes(size);
}
static const Tensor& resize_(const Tensor& self, IntArrayRef size, std::optional<MemoryFormat>) {
    int64_t needed = (c10::multiply_integers(size) + self.storage_offset()) * self.itemsize();
    if ((int64_t)self.storage().nbytes() < needed) resize_storage(self.storage(), needed);
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
    return self;
}

// The CPU has none for integers.
static Tensor make_histogram(const Tensor& t, int64_t bins, const Scalar& low, const Scalar& high) {
    auto host = on_host(t);
    return alias(at::histc(host.to(kFloat), bins, low, high).to(host.scalar_type()), t.device());
}
static const auto boxed_compute = torch::CppFunction::makeFromBoxedFunction<&compute>;
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(boxed_compute()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
    m.impl("empty.memory_format", make_empty);
    m.impl("empty_strided", make_strided);
    m.impl("copy_", copy_);
    m.impl("resize_", resize_);
    m.impl("set_.source_Storage_storage_offset", set_at);
    m.impl("set_.source_Tensor", [](Tensor& self, const Tensor& source) -> Tensor& {
        return set_at(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
    });
    m.impl("set_.source_Storage", [](Tensor& self, Storage storage) -> Tensor& {
        return set_at(self, storage, 0, {(int64_t)storage.nbytes() / (int64_t)self.itemsize()}, {});
    });
    m.impl("set_", [](Tensor& self) -> Tensor& {
        return set_at(self, make_empty({0}, self.scalar_type(), {}, self.device(), {}, {}).storage(), 0, {0}, {});
    });
    m.impl("histc", make_histogram);
    for (auto name : {"_grouped_mm", "convolution", "convolution_backward"}) m.impl(name, boxed_compute());
    m.impl("record_stream", [](Tensor&, Stream) {});
    m.impl("view", TORCH_FN(native::view));
    m.impl("as_strided", TORCH_FN(native::as_strided_tensorimpl));
    m.impl("_reshape_alias", TORCH_FN(native::_reshape_alias));
    m.impl("unfold", TORCH_FN(native::unfold));
    auto& dispatcher = c10::Dispatcher::singleton();
    for (auto& name : dispatcher.getAllOpNames()) {
        auto op = dispatcher.findSchema(name);
        if (!op || name.name.rfind("aten::", 0) || op->hasKernelForDispatchKey(DispatchKey::CUDA)) continue;
        if (op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional))
            if (op->hasKernelForDispatchKey(DispatchKey::CPU))
                m.impl(toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&check_first>());
    }
}

// ---- reads of host memory
static void check_read(const Tensor& t, const std::string& operation) {
    if (is_pending(t)) report("EARLY_READ", operation, describe(t));
}
static std::unique_ptr<ObserverContext> on_operation(const RecordFunction& call) {
    auto name = call.operator_name();
    auto op = name ? c10::Dispatcher::singleton().findSchema(*name) : std::nullopt;
    if (!op || name->name == "aten::set_") return nullptr;
    if (name->name != "aten::copy_" && !op->hasKernelForDispatchKey(DispatchKey::CPU)) return nullptr;
    bool on_device = false;  // whose copies come after the pending ones
    for (auto& value : call.inputs()) each_tensor(value, [&](const Tensor& t) { on_device |= is_on(t, kCUDA); });
    for (size_t i = 0; i < call.inputs().size() && !on_device; i++)
        if (!op->schema().arguments()[i].alias_info())  // neither a view nor written
            each_tensor(call.inputs()[i], [&](const Tensor& t) { check_read(t, name->name); });
    return nullptr;
}

void watch_reads(bool on) {
    static auto watch = RecordFunctionCallback(&on_operation).needsInputs(true).scopes({RecordScope::FUNCTION});
    static auto handle = addGlobalCallback(watch);
    on ? reenableCallback(handle) : disableCallback(handle);
}

// Torch starts the autograd threads of all devices once, at the first backward pass. After one without the device there
// are none, and a backward pass on the device would stop: they are started here (torch 2.13).
struct Threads : torch::autograd::Engine {
    static void start_if_late() {
        Engine& engine = get_default_engine();
        bool has_started = engine.*(&Threads::thread_pool_shared_) != nullptr;
        bool has_none = (engine.*(&Threads::device_ready_queues_)).empty();
        if (has_started && has_none) (engine.*(&Threads::start_device_threads))();
    }
};

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    // A CPU build creates one object of the base class, which has no members, at its first use, and returns it for
    // ever. It gets the virtual functions of the device's class: a registered class would come too late for a process
    // in which something has asked already (torch 2.13, aten/src/ATen/detail/CUDAHooksInterface.cpp).
    static const at::Hooks hooks{at::CUDAHooksArgs{}};
    static_assert(sizeof(at::Hooks) == sizeof(void*) && sizeof(at::CUDAHooksInterface) == sizeof(void*));
    memcpy((void*)&at::detail::getCUDAHooks(), (const void*)&hooks, sizeof(void*));
    m.def("set_callback", [](py::object callback) { on_event = new py::object(callback); });
    m.def("check_exactly", [](std::vector<std::string> names) { checked_exactly.insert(names.begin(), names.end()); });
    m.def("set_devices", [](int number) { num_devices = number; });
    m.def("set_reports_kernels", [](bool reports) { reports_kernels = reports; });
    m.def("start_threads_if_late", &Threads::start_if_late, py::call_guard<py::gil_scoped_release>());
    m.attr("most_devices") = most_devices;
    m.def("check_read", &check_read);
    m.def("cpu_alias", &on_host);
    m.def("pin", [](uintptr_t start, size_t size) { return pin((void*)start, size), 0; });
    m.def("default_gen", &default_generator);
    m.def("resize_storage", &resize_storage);

    // What torch.cuda calls in torch._C.
    auto nothing = [](py::args, py::kwargs) {};
    auto no = [](py::args) { return false; };
    auto stream = [](int index) { return std::make_tuple(0, (int)gpu(index).index(), (int)kCUDA); };
    for (auto name : {"init", "setStream", "emptyCache", "ipc_collect", "resetAccumulatedMemoryStats"})
        m.def((std::string("_cuda_") + name).c_str(), nothing);
    for (auto name : {"_cuda_getCurrentStream", "_cuda_getDefaultStream"}) m.def(name, stream);
    for (auto name : {"_cuda_exchangeDevice", "_cuda_maybeExchangeDevice", "_cuda_setDevice"})
        m.def(name, [](int index) { return (int)exchange(index); });
    for (auto name : {"_cuda_isInBadFork", "_cuda_isCurrentStreamCapturing"}) m.def(name, no);
    m.def("_cuda_canDeviceAccessPeer", [](int, int) { return true; });
    m.def("_cuda_getCurrentRawStream", [](int) { return 0; });
    m.def("_cuda_getDeviceCount", [] { return num_devices; });
    m.def("_cuda_getDevice", [] { return (int)current; });
    m.def("_cuda_getArchFlags", [] { return "sm_90"; });
    m.def("_cuda_synchronize", [] { wait("SYNC", "torch.cuda.synchronize"); });
    m.def("_cuda_resetPeakMemoryStats", [](int) { peak = (int64_t)allocated; });
    m.def("_cuda_memoryStats", [](int) {
        using Numbers = std::map<std::string, std::map<std::string, int64_t>>;
        Numbers used{{"all", {{"current", allocated}, {"peak", peak}}}};
        return std::map<std::string, Numbers>{{"allocated_bytes", used}, {"reserved_bytes", used}};
    });
    m.def("_nccl_version", [] { return 22903; });
    m.def("_nccl_version_suffix", [] { return py::bytes(""); });
}
