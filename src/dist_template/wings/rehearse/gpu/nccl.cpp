// A process group over gloo that has the name of NCCL, and refuses what NCCL refuses.
#include <torch/extension.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PyProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
using namespace at;
using c10::intrusive_ptr;
using c10d::Work;
typedef c10d::Backend CB;
typedef Tensor (*Alias)(const Tensor&);
// Never freed: they would be after Python's end.
static py::object &alias_fn = *new py::object(), &event_fn = *new py::object();
static std::set<ScalarType> ok = {kFloat,
                                  kDouble,
                                  kHalf,
                                  kBFloat16,
                                  kChar,
                                  kByte,
                                  kInt,
                                  kLong,
                                  kBool,
                                  ScalarType::Float8_e4m3fn,
                                  ScalarType::Float8_e5m2};
static void note(const std::string& k, const std::string& o, const std::string& d) {
    py::gil_scoped_acquire g;
    event_fn(k, o, d);
}
struct FakeNccl : CB {
    intrusive_ptr<CB> g;
    FakeNccl(intrusive_ptr<CB> b, int r, int s) : CB(r, s), g(b) {}
    const std::string getBackendName() const override { return "nccl"; }
    bool supportsCoalescing() const override { return false; }
    void setTimeout(std::chrono::milliseconds t) override { g->setTimeout(t); }
    bool had_messages = false, had_collectives = false;
    // Outside of a batch, NCCL orders messages and collectives of one eager group behind each other.
    void used(const std::string& op) {
        bool mixed = had_messages && had_collectives;
        (op == "send" || op == "recv" ? had_messages : had_collectives) = true;
        if (!mixed && had_messages && had_collectives) note("NCCL_MIXED_GROUP", op, "messages and collectives");
    }
    Tensor on_host(const Tensor& t, const char* op) {
        used(op);
        if (!t.device().is_cuda()) {
            note("NCCL_CPU_TENSOR", op, "cpu tensor");
            throw std::runtime_error(std::string("No backend type associated with device type cpu: ") + op);
        }
        if (!t.is_non_overlapping_and_dense()) {
            note("NCCL_NONCONTIGUOUS", op, "");
            throw std::runtime_error(std::string("Tensors must be contiguous: ") + op);
        }
        if (!t.is_contiguous()) note("NCCL_STRIDED", op, "dense but not contiguous");
        if (!ok.count(t.scalar_type()) && !isComplexType(t.scalar_type())) {
            note("NCCL_DTYPE", op, std::string(t.dtype().name()));
            throw std::runtime_error("nccl dtype");
        }
        py::gil_scoped_acquire gil;
        return py::cast<Tensor>(alias_fn(t));
    }
    std::vector<Tensor> on_host(const std::vector<Tensor>& v, const char* op) {
        std::vector<Tensor> r;
        for (auto& t : v) r.push_back(on_host(t, op));
        return r;
    }
    std::vector<std::vector<Tensor>> on_host(const std::vector<std::vector<Tensor>>& v, const char* op) {
        std::vector<std::vector<Tensor>> r;
        for (auto& t : v) r.push_back(on_host(t, op));
        return r;
    }
    // Gloo has no averages: it sums what is scaled before. Returns `o` for the sum.
    template <class O>
    O sum_of(const O& given, std::vector<Tensor>& inputs, bool may_overwrite = false) {
        O o = given;
        double factor = 1.0 / getSize();
        if (o.reduceOp.op_ == c10d::ReduceOp::PREMUL_SUM)
            factor = static_cast<c10d::NCCLPreMulSumSupplement*>(o.reduceOp.supplement_.get())->double_factor;
        else if (o.reduceOp.op_ != c10d::ReduceOp::AVG)
            return o;
        o.reduceOp = c10d::ReduceOp::SUM;
        for (auto& t : inputs) t = may_overwrite ? t.mul_(factor) : t.mul(factor);
        return o;
    }
    intrusive_ptr<Work> broadcast(std::vector<Tensor>& t, const c10d::BroadcastOptions& o) override {
        auto x = on_host(t, "broadcast");
        return g->broadcast(x, o);
    }
    intrusive_ptr<Work> allreduce(std::vector<Tensor>& t, const c10d::AllreduceOptions& o) override {
        auto x = on_host(t, "allreduce");
        auto sum = sum_of(o, x, true);
        return g->allreduce(x, sum);
    }
    intrusive_ptr<Work> allreduce_coalesced(std::vector<Tensor>& t, const c10d::AllreduceCoalescedOptions& o) override {
        intrusive_ptr<Work> w;
        c10d::AllreduceOptions each;
        each.reduceOp = o.reduceOp;
        for (auto& tensor : t) {
            std::vector<Tensor> one{tensor};
            w = allreduce(one, each);
            w->wait();
        }
        return w;
    }
    intrusive_ptr<Work> reduce(std::vector<Tensor>& t, const c10d::ReduceOptions& o) override {
        auto x = on_host(t, "reduce");
        return g->reduce(x, o);
    }
    intrusive_ptr<Work> allgather(std::vector<std::vector<Tensor>>& out, std::vector<Tensor>& in,
                                  const c10d::AllgatherOptions& o) override {
        auto x = on_host(out, "allgather");
        auto y = on_host(in, "allgather");
        return g->allgather(x, y, o);
    }
    intrusive_ptr<Work> _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& o) override {
        auto x = on_host(out, "_allgather_base"), y = on_host(in, "_allgather_base");
        return g->_allgather_base(x, y, o);
    }
    intrusive_ptr<Work> allgather_into_tensor_coalesced(std::vector<Tensor>& out, std::vector<Tensor>& in,
                                                        const c10d::AllgatherOptions& o) override {
        auto x = on_host(out, "ag_coalesced"), y = on_host(in, "ag_coalesced");
        intrusive_ptr<Work> w;
        for (size_t i = 0; i < x.size(); i++) w = g->_allgather_base(x[i], y[i], o);
        return w;
    }
    intrusive_ptr<Work> gather(std::vector<std::vector<Tensor>>& out, std::vector<Tensor>& in,
                               const c10d::GatherOptions& o) override {
        auto x = on_host(out, "gather");
        auto y = on_host(in, "gather");
        return g->gather(x, y, o);
    }
    intrusive_ptr<Work> scatter(std::vector<Tensor>& out, std::vector<std::vector<Tensor>>& in,
                                const c10d::ScatterOptions& o) override {
        auto x = on_host(out, "scatter");
        auto y = on_host(in, "scatter");
        return g->scatter(x, y, o);
    }
    intrusive_ptr<Work> reduce_scatter(std::vector<Tensor>& out, std::vector<std::vector<Tensor>>& in,
                                       const c10d::ReduceScatterOptions& o) override {
        auto x = on_host(out, "reduce_scatter");
        auto y = on_host(in, "reduce_scatter");
        auto sum = o;
        for (auto& each : y) sum = sum_of(o, each);
        return g->reduce_scatter(x, y, sum);
    }
    intrusive_ptr<Work> _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& o) override {
        auto x = on_host(out, "_reduce_scatter_base");
        std::vector<Tensor> y{on_host(in, "_reduce_scatter_base")};
        auto sum = sum_of(o, y);
        return g->_reduce_scatter_base(x, y[0], sum);
    }
    intrusive_ptr<Work> reduce_scatter_tensor_coalesced(std::vector<Tensor>& out, std::vector<Tensor>& in,
                                                        const c10d::ReduceScatterOptions& o) override {
        intrusive_ptr<Work> w;
        for (size_t i = 0; i < out.size(); i++) w = _reduce_scatter_base(out[i], in[i], o);
        return w;
    }
    intrusive_ptr<Work> alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& os, std::vector<int64_t>& is,
                                      const c10d::AllToAllOptions& o) override {
        auto x = on_host(out, "alltoall_base"), y = on_host(in, "alltoall_base");
        return g->alltoall_base(x, y, os, is, o);
    }
    intrusive_ptr<Work> alltoall(std::vector<Tensor>& out, std::vector<Tensor>& in,
                                 const c10d::AllToAllOptions& o) override {
        auto x = on_host(out, "alltoall"), y = on_host(in, "alltoall");
        return g->alltoall(x, y, o);
    }
    intrusive_ptr<Work> send(std::vector<Tensor>& t, int d, int tag) override {
        auto x = on_host(t, "send");
        note("NCCL_P2P", "send", "rank " + std::to_string(getRank()) + "->" + std::to_string(d));
        return g->send(x, d, tag);
    }
    intrusive_ptr<Work> recv(std::vector<Tensor>& t, int s, int tag) override {
        auto x = on_host(t, "recv");
        note("NCCL_P2P", "recv", "rank " + std::to_string(getRank()) + "<-" + std::to_string(s));
        return g->recv(x, s, tag);
    }
    intrusive_ptr<Work> recvAnysource(std::vector<Tensor>& t, int tag) override {
        throw std::runtime_error("ProcessGroupNCCL does not support recvAnysource");
    }
    intrusive_ptr<Work> barrier(const c10d::BarrierOptions& o) override {
        note("SYNC", "nccl barrier", "");
        return g->barrier(o);
    }
    void setSequenceNumberForGroup() override { g->setSequenceNumberForGroup(); }
    uint64_t getSequenceNumberForGroup() override { return g->getSequenceNumberForGroup(); }
};
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
namespace c10d {
struct FakeTimer : Timer {
    explicit FakeTimer(c10::Device) {}
    std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, FakeTimer)
}  // namespace c10d
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.def("make", [](intrusive_ptr<CB> b, int r, int s) -> intrusive_ptr<CB> {
        return c10::make_intrusive<FakeNccl>(b, r, s);
    });
    m.def("setup", [](py::object al, py::object ev) {
        alias_fn = al;
        event_fn = ev;
    });
}
