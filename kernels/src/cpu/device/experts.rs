//! Mixtures of experts. Each expert computes its MLP over the rows that chose it, with the kernels of dense layers. One
//! operation computes many experts.

use super::CpuDevice;
use crate::cpu::experts::{Router, RowChoice, gather, scatter_add};
use crate::cpu::gemm::Epilogue;
use crate::cpu::memory::{Tensor, Vector, Weights};
use crate::device::MixSizes;
use crate::{DeviceError, ExpertBuffers, ExpertChoice, Experts, MixExperts};

impl Experts for CpuDevice {
    const IMPLEMENTED: bool = true;

    fn mix_experts(
        &mut self,
        mix: MixExperts<'_, Tensor, Weights, Vector>,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        let MixExperts {
            x,
            valid_rows,
            logits,
            routing,
            choice,
            limit,
            first,
            gate_up,
            down,
            buffers,
            layer,
        } = mix;
        let (rows, width, experts) = (x.live(), x.width(), logits.width());
        let (logit_rows, top_k, held) = (logits.live(), routing.top_k, [gate_up.len(), down.len()]);
        MixSizes { rows, logit_rows, valid_rows, experts, top_k, first, held }.check()?;
        let choice = match choice {
            ExpertChoice::Largest { bias } => {
                RowChoice::Largest(bias.map(|bias| bias.read(experts)).transpose()?)
            }
            ExpertChoice::ByToken(table) => RowChoice::ByToken {
                table: table.values(),
                token_ids: self.step.tokens_of_rows(rows, valid_rows)?,
            },
        };
        let router = Router { routing, choice, experts };
        router.check(valid_rows)?;
        let out = out.written(rows, width)?;
        out.fill(0.0);
        // The routes are taken out of the device, because its other operations need `&mut self` meanwhile.
        let mut routes = std::mem::take(&mut self.routes);
        routes.fit(buffers.inputs.capacity(), experts, routing.top_k);
        let logits = &logits.values()[..valid_rows * experts];
        routes.route(&mut self.pool, logits, &router)?;
        let totals = self.expert_tokens.entry(layer).or_default();
        totals.resize(experts, 0);
        routes.count(totals);

        let ExpertBuffers { inputs, activated, outputs } = buffers;
        let like = |one: usize, other: usize| {
            gate_up[one].is_like(&gate_up[other]) && down[one].is_like(&down[other])
        };
        let mut next = 0;
        while next < gate_up.len() {
            let of_a_kind = (next + 1..gate_up.len()).find(|&expert| !like(next, expert));
            let experts = next..of_a_kind.unwrap_or(gate_up.len());
            let (gate_up_of, down_of) = (&gate_up[experts.clone()], &down[experts.clone()]);
            let (behind, groups, rows) =
                routes.group(first + experts.start..first + experts.end, inputs.capacity());
            next = behind - first;
            if rows.is_empty() {
                continue;
            }
            gather(&mut self.pool, x.values(), width, rows, inputs.written(rows.len(), width)?)?;
            let gates = activated.written(rows.len(), gate_up_of[0].gates()?)?;
            self.grouped_product(inputs, None, (gate_up_of, groups), Epilogue::Gated(limit), gates)?;
            let down_outputs = outputs.written(rows.len(), down_of[0].plain_outputs()?)?;
            self.grouped_product(activated, None, (down_of, groups), Epilogue::Set(None), down_outputs)?;
            scatter_add(&mut self.pool, outputs.read(width)?, width, rows, out)?;
        }
        self.routes = routes;
        Ok(())
    }

    fn expert_tokens(&mut self, layer: usize, out: &mut Vec<u64>) -> Result<(), DeviceError> {
        out.clear();
        out.extend(self.expert_tokens.get(&layer).into_iter().flatten());
        Ok(())
    }
}
