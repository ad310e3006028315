// Calls over a cache that are repeated: what is the same for all layers of a model is made once.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

#include "flash.h"
#include "flash_api_fwd.h"
#include "flash_api_tensors.h"

namespace flash {

// Planned calls by number, as an operator's arguments cannot be pointers.
class PlanTable {
  public:
    int64_t add(Planned planned) {
        const std::lock_guard lock(mutex_);
        plans_.emplace(++last_, std::make_shared<const Planned>(std::move(planned)));
        return last_;
    }
    std::shared_ptr<const Planned> find(int64_t number) {
        const std::lock_guard lock(mutex_);
        const auto found = plans_.find(number);
        if (found == plans_.end()) {
            fail("expected the number of a plan, got ", number);
        }
        return found->second;
    }
    void remove(int64_t number) {
        const std::lock_guard lock(mutex_);
        plans_.erase(number);
    }

  private:
    std::mutex mutex_;
    int64_t last_ = 0;
    std::unordered_map<int64_t, std::shared_ptr<const Planned>> plans_;
};

inline PlanTable &plan_table() {
    static PlanTable table;
    return table;
}

// Repeats a planned call on tensors of the planned sizes, and returns out. appended: has k and v if
// the plan appends, else not. renews: lengths or pages have changed since, so the plan is made
// anew.
inline Tensor run_planned(const Planned &planned, const Tensor &q, const Tensor &k, const Tensor &v,
                          const Cache &appended, bool renews) {
    const Inputs inputs = read_inputs(q, k, v, 4, true);
    const auto &[dtype, device, ql, kl, vl] = inputs;
    const Inputs &made = planned.inputs;
    if (dtype != made.dtype || device != made.device || !ql.same_sizes(made.q) ||
        !kl.same_sizes(made.k)) {
        fail("expected q, k_cache and v_cache of the planned sizes, dtype and device");
    }
    if (appended.k.has_value() != planned.appends) {
        fail("expected k and v where they were planned");
    }
    Flash_fwd_params params = planned.params;
    params.q_ptr = q.const_data_ptr();
    params.k_ptr = k.const_data_ptr();
    params.v_ptr = v.const_data_ptr();
    check_vectorised(ql, params.q_ptr, "q");
    check_vectorised(kl, params.k_ptr, "k");
    check_vectorised(vl, params.v_ptr, "v");
    if (!folds(ql)) {
        fail("expected q whose batch and rows are one dimension");
    }
    if (planned.appends) {
        set_new(params, appended, inputs, planned.params.seqlen_new);
        if (params.seqlen_new != planned.params.seqlen_new) {
            fail("expected k and v of the planned size");
        }
    }
    if (planned.rotated.has_value()) {
        rotate_queries(params, ql, *planned.rotated);
    }
    const torch::stable::accelerator::DeviceGuard guard(device);
    Tensor out = std::get<0>(make_outputs(q, inputs, true, false));
    const Layout ol = read_layout(out, "out", 4);
    params.o_ptr = out.mutable_data_ptr();
    set_strides(params, ql, kl, vl, ol);
    const bool rotates = planned.rotated.has_value();
    fold_batch(params, rotates ? read_layout(*planned.rotated, "q", 4) : ql, ol);
    void *const stream = current_stream(device);
    if (renews || planned.appends) {
        Flash_fwd_params before = params;
        if (!renews) {
            before.plan_ptr = nullptr;  // only appends
        }
        check_launch(*planned.kernel, planned.kernel->plan(&before, stream));
    }
    if (params.total_q > 0) {
        check_launch(*planned.kernel, planned.kernel->launch(&params, stream));
    }
    return out;
}

}  // namespace flash
