// The operations of a backend that computes a part of the experts of a model.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/backend.h"
#include "kernels/exchange/exchange.h"
#include "kernels/plan_parts.h"

namespace moeserve {

// Like the operations of Backend, these are called by one thread at a time inside RunStep(), of
// steps that are not replayable.
class RankOps {
 public:
  virtual ~RankOps() = default;
  // Waits for a plan and returns its expert_offsets [num_experts + 1] in host memory; valid until
  // the next call, and as long as the plan.
  virtual std::span<const int32_t> ExpertOffsets(const RoutingPlan& plan) = 0;
  // Divides the plan of the slot's last Route(). The result is valid until the slot's next call.
  virtual PlanParts Divide(const RoutingPlan& plan, const PlanOwners& owners, int slot) = 0;
  // Starts to exchange the results of a joint plan, of which the rank has computed its own rows:
  // `rows_of_rank` are those of ranks 0, 1, ...; rows that follow them are not exchanged. Until
  // FinishGather(), nothing reads or writes the rows of other ranks. At most one at a time.
  virtual void StartGather(const RowsView& results, std::span<const int64_t> rows_of_rank,
                           Exchange& exchange) = 0;
  virtual void FinishGather(Exchange& exchange) = 0;

  // Starts to exchange results if each row's are added by one rank: parts of a plan that was
  // divided with row_begin. `own` [parts.local.capacity] are the results of this rank; `results`
  // [parts.joint.capacity] get those of the rows that it adds, its own at once and those of others
  // until FinishScatter(). `packed` is memory for the own results that others add. All have the
  // same columns, stride and type. Until FinishScatter(), nothing uses `packed` and `results`. At
  // most one at a time, and none during a gather.
  virtual void StartScatter(const RowsView& own, const PlanParts& parts, const RowsView& packed,
                            const RowsView& results, Exchange& exchange) = 0;
  virtual void FinishScatter(Exchange& exchange) = 0;

  // Writes the columns that the ranks have computed to `output` [n, any] f32 at the leader: part r
  // begins at column r * `own`.cols, and columns that exceed those of `output` are dropped. `own`
  // [n, c], f32 without padding, has equal sizes on all ranks.
  virtual void GatherColumns(const RowsView& own, const RowsView& output, Exchange& exchange) = 0;
  // Returns a number that depends on all bits of the rows [T, d], f32 without padding, and waits
  // for them.
  virtual uint64_t Checksum(const RowsView& rows) = 0;
};

}  // namespace moeserve
