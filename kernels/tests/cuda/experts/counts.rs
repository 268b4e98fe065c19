//! Tests the counts of tokens per expert, the size of scratch memory, and that unfit operands are refused.

use tutti_kernels::cuda::CudaDevice;
use tutti_kernels::{
    Device, DeviceError, ExpertChoice, Experts, MixExperts, PlanesShape, Routing, StepResults, WeightType,
};

use super::{LAYER, Logits, Mixture, buffers, counts};
use crate::support::{Share, begin, cuda, tensor};

/// With two steps in flight, the counts include only the collected steps.
#[test]
fn counts_are_those_of_the_collected_steps() {
    let Some(mut gpu) = cuda("counts of experts") else { return };
    let case = Mixture { held: (1, 2), ..Mixture::new(2, [8, 8], 4, 2) };
    let (gate_up, down) = case.weights(&mut gpu);
    let mut planes = gpu.planes(&PlanesShape::default()).unwrap();
    let (mut buffers, mut out) = buffers(&mut gpu, 2, [8, 8]);
    let x = tensor(&mut gpu, 8, &[1.0; 16]);
    assert_eq!(counts(&mut gpu), [0u64; 0]);
    let mut steps = [[9.0, 0.0, 8.0, 0.0], [0.0, 9.0, 8.0, 0.0]].map(|row: [f32; 4]| {
        let logits = tensor(&mut gpu, 4, &[row, row].concat());
        begin(&mut gpu, &mut planes, &[Share { tokens: 2, ..Share::default() }], &[], &[], &[]).unwrap();
        for layer in [LAYER, LAYER + 2] {
            let (x, valid_rows, logits, first) = (&x, 2, &logits, 1);
            let (routing, gate_up, down, buffers) = (case.routing, &gate_up[..], &down[..], &mut buffers);
            let choice = ExpertChoice::Largest { bias: None };
            let mix = MixExperts {
                x,
                valid_rows,
                logits,
                routing,
                first,
                gate_up,
                down,
                choice,
                limit: None,
                buffers,
                layer,
            };
            gpu.mix_experts(mix, &mut out).unwrap();
        }
        (gpu.end_step().unwrap(), logits)
    });
    let mut collect = |gpu: &mut CudaDevice, step: usize| {
        let mut results = StepResults::default();
        assert!(gpu.collect(&mut steps[step].0, None, &mut results).unwrap());
        counts(gpu)
    };
    assert_eq!(collect(&mut gpu, 0), [2, 0, 2, 0]);
    assert_eq!(collect(&mut gpu, 1), [2, 2, 4, 0]);
    let mut other = Vec::new();
    gpu.expert_tokens(LAYER + 2, &mut other).unwrap();
    assert_eq!(other, [2, 2, 4, 0]);
    gpu.expert_tokens(LAYER + 1, &mut other).unwrap();
    assert_eq!(other, [0u64; 0]);
}

/// Scratch memory has its final size after one step, whatever experts the rows of later steps choose. So a profile of
/// the largest step includes all scratch memory.
#[test]
fn memory_of_experts_is_final_after_one_step() {
    let Some(mut gpu) = cuda("memory of experts") else { return };
    let case =
        |rows, logits| Mixture { dtype: WeightType::Bf16, logits, ..Mixture::new(rows, [40, 24], 4, 2) };
    let (gate_up, down) = case(64, Logits::Random).weights(&mut gpu);
    let (mut buffers, mut out) = buffers(&mut gpu, 64, [40, 24]);
    let steps = [(1, Logits::Random), (64, Logits::Random), (64, Logits::AllOn(3)), (2, Logits::Ties)];
    let steps = steps.map(|(rows, logits)| {
        let (values, logits) = case(rows, logits).inputs();
        let [mut x, mut of_router] = [40, 4].map(|width| gpu.tensor(64, width).unwrap());
        gpu.upload(&values, &mut x).unwrap();
        gpu.upload(&logits, &mut of_router).unwrap();
        (rows, x, of_router)
    });
    let sizes = steps.map(|(valid_rows, x, logits)| {
        let (x, logits, buffers) = (&x, &logits, &mut buffers);
        let (routing, first, layer) = (case(1, Logits::Random).routing, 0, LAYER);
        let (gate_up, down) = (&gate_up[..], &down[..]);
        let choice = ExpertChoice::Largest { bias: None };
        let mix = MixExperts {
            x,
            valid_rows,
            logits,
            routing,
            first,
            gate_up,
            down,
            choice,
            limit: None,
            buffers,
            layer,
        };
        gpu.mix_experts(mix, &mut out).unwrap();
        gpu.step_bytes()
    });
    assert_eq!(sizes, [sizes[0]; 4]);
}

#[test]
fn operands_of_experts_that_do_not_fit_are_refused() {
    let Some(mut gpu) = cuda("operands of experts") else { return };
    let case = Mixture::new(2, [24, 16], 4, 2);
    let (gate_up, down) = case.weights(&mut gpu);
    let (_, half) = Mixture { dtype: WeightType::F16, ..case.clone() }.weights(&mut gpu);
    let (narrow, _) = Mixture { width: 20, ..case.clone() }.weights(&mut gpu);
    let (mut buffers, mut out) = buffers(&mut gpu, 3, [24, 16]);
    let x = tensor(&mut gpu, 24, &[1.0; 2 * 24]);
    let logits = [2, 3].map(|rows| tensor(&mut gpu, 4, &vec![1.0; rows * 4]));
    let mut refusal = |logits, valid_rows, top_k, first, gate_up, down| {
        let (routing, buffers) = (Routing { renormalise: true, ..Routing::softmax(top_k) }, &mut buffers);
        let choice = ExpertChoice::Largest { bias: None };
        let mix = MixExperts {
            x: &x,
            valid_rows,
            logits,
            routing,
            first,
            gate_up,
            down,
            choice,
            limit: None,
            buffers,
            layer: LAYER,
        };
        match gpu.mix_experts(mix, &mut out) {
            Err(error @ (DeviceError::Misuse(_) | DeviceError::Unsupported(_))) => error.to_string(),
            other => panic!("{other:?}"),
        }
    };
    let refusals = [
        (refusal(&logits[1], 2, 2, 0, &gate_up, &down), "3 rows of router logits for 2"),
        (refusal(&logits[0], 2, 0, 0, &gate_up, &down), "0 of 4 experts"),
        (refusal(&logits[0], 2, 5, 0, &gate_up, &down), "5 of 4 experts"),
        (refusal(&logits[0], 2, 2, 1, &gate_up, &down), "from 1 on, of 4"),
        (refusal(&logits[0], 2, 2, 0, &gate_up[1..], &down), "[3, 4] experts"),
        (refusal(&logits[0], 3, 2, 0, &gate_up, &down), "3 valid rows of 2"),
        (refusal(&logits[0], 2, 2, 0, &down, &down), "plain matrix"),
        (refusal(&logits[0], 2, 2, 0, &gate_up, &gate_up), "gate and up, where"),
        (refusal(&logits[0], 2, 2, 0, &narrow, &down), "expert 0: matrices of 16 gates of 20"),
        (refusal(&logits[0], 2, 2, 0, &gate_up, &half), "expert 0: gate and up in F32, down in F16"),
    ];
    for (error, wanted) in refusals {
        assert!(error.contains(wanted), "{error}");
    }
}
