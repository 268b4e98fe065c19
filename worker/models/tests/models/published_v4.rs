//! Tests of checkpoints in the layout of the published DeepSeek-V4: names, types, scales, and tensors of a draft model.

use std::{collections::BTreeMap, path::Path};

use crate::common::{
    PAGES, SLOTS, Tensor, config, device, families::deepseek_v4, generate, prompt, try_load_on, write_config,
    write_tensors,
};
use safetensors::tensor::Dtype;
use serde_json::{Value, json};
use tempfile::TempDir;
use tutti_kernels::e4m3;
use tutti_models::LoadFormat::Auto;

/// The values of floats of four bits, by their code.
const E2M1: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// A checkpoint with matrices of few bits, and the same one with all matrices in f32.
#[derive(Default)]
struct Checkpoint {
    published: BTreeMap<String, Tensor>,
    widened: BTreeMap<String, Tensor>,
    random: u32,
}

impl Checkpoint {
    fn next(&mut self) -> u32 {
        self.random = self.random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        self.random >> 8
    }

    /// Adds a tensor of the same type to both.
    fn add(&mut self, name: &str, tensor: Tensor) {
        self.published.insert(name.into(), tensor.clone());
        self.widened.insert(name.into(), tensor);
    }

    /// Adds a tensor in f32 with values around `middle`.
    fn floats(&mut self, name: &str, shape: &[usize], middle: f32, spread: f32) {
        let count: usize = shape.iter().product();
        let value = |number: u32| middle + spread * ((number % 2001) as f32 / 1000.0 - 1.0);
        let bytes = (0..count).flat_map(|_| value(self.next()).to_le_bytes()).collect();
        self.add(name, (Dtype::F32, shape.to_vec(), bytes));
    }

    fn norm(&mut self, module: &str, width: usize) {
        self.floats(&format!("{module}.weight"), &[width], 1.0, 0.3);
    }

    fn widen(&mut self, module: &str, shape: [usize; 2], values: Vec<f32>) {
        let bytes = values.into_iter().flat_map(f32::to_le_bytes).collect();
        self.widened.insert(format!("{module}.weight"), (Dtype::F32, shape.to_vec(), bytes));
    }

    fn publish(&mut self, module: &str, dtype: Dtype, [rows, columns]: [usize; 2], codes: Vec<u8>) {
        self.published.insert(format!("{module}.weight"), (dtype, vec![rows, columns], codes));
    }

    fn scales(&mut self, module: &str, shape: [usize; 2]) -> Vec<u8> {
        let scales: Vec<u8> = (0..shape[0] * shape[1]).map(|_| 122 + (self.next() % 3) as u8).collect();
        let tensor = (Dtype::F8_E8M0, shape.to_vec(), scales.clone());
        self.published.insert(format!("{module}.scale"), tensor);
        scales
    }

    /// Adds a matrix in floats of eight bits with a power of two per block of 128 x 128.
    fn fp8(&mut self, module: &str, rows: usize, columns: usize) {
        let per_row = columns.div_ceil(128);
        let scales = self.scales(module, [rows.div_ceil(128), per_row]);
        let codes: Vec<u8> = (0..rows * columns)
            .map(|_| self.next())
            .map(|x| (x & 0x87) as u8 | 0x30 | (x >> 8 & 8) as u8)
            .collect();
        let value = |(index, &code): (usize, &u8)| {
            let (row, column) = (index / columns, index % columns);
            e4m3::value(code) * power(scales[row / 128 * per_row + column / 128])
        };
        let values = codes.iter().enumerate().map(value).collect();
        self.widen(module, [rows, columns], values);
        self.publish(module, Dtype::F8_E4M3, [rows, columns], codes);
    }

    /// Adds a matrix in floats of four bits, two per byte, with a power of two per 32 inputs.
    fn fp4(&mut self, module: &str, rows: usize, columns: usize) {
        let scales = self.scales(module, [rows, columns / 32]);
        let codes: Vec<u8> = (0..rows * columns / 2).map(|_| self.next() as u8).collect();
        let value = |index: usize| {
            let code = codes[index / 2] >> (4 * (index % 2)) & 15;
            let magnitude = E2M1[usize::from(code & 7)];
            (if code & 8 == 0 { magnitude } else { -magnitude }) * power(scales[index / 32])
        };
        let values = (0..rows * columns).map(value).collect();
        self.widen(module, [rows, columns], values);
        self.publish(module, Dtype::I8, [rows, columns / 2], codes);
    }

    fn streams(&mut self, name: &str, outputs: usize, parts: usize, hidden: usize) {
        self.floats(&format!("{name}_fn"), &[outputs, 4 * hidden], 0.0, 0.1);
        self.floats(&format!("{name}_base"), &[outputs], 0.0, 1.0);
        self.floats(&format!("{name}_scale"), &[parts], 1.0, 0.5);
    }

    fn compressor(&mut self, module: &str, ratio: usize, width: usize, dim: usize, hidden: usize) {
        self.floats(&format!("{module}.wkv.weight"), &[width, hidden], 0.0, 0.2);
        self.floats(&format!("{module}.wgate.weight"), &[width, hidden], 0.0, 0.2);
        self.floats(&format!("{module}.ape"), &[ratio, width], 0.0, 1.0);
        self.norm(&format!("{module}.norm"), dim);
    }

    /// Returns a folder with the tensors of `published` or of `widened`.
    fn write(config: &Value, tensors: &BTreeMap<String, Tensor>) -> TempDir {
        let dir = tempfile::tempdir().unwrap();
        write_config(dir.path(), config);
        write_tensors(&dir.path().join("model.safetensors"), tensors);
        dir
    }
}

/// Returns two to the power of a scale's exponent.
fn power(scale: u8) -> f32 {
    2f32.powi(i32::from(scale) - 127)
}

/// Returns the config of a small model of the published layout.
fn small(changes: &Value) -> Value {
    let mut all = deepseek_v4().1;
    let own = json!({
        "hidden_size": 64, "vocab_size": 96, "head_dim": 32, "qk_rope_head_dim": 8, "q_lora_rank": 160, "o_groups": 2,
        "o_lora_rank": 128, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "num_hidden_layers": 3, "compress_ratios": [0, 4, 128, 0], "num_hash_layers": 1,
    });
    for changes in [&own, changes] {
        all.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    }
    config(&all)
}

fn checkpoint() -> Checkpoint {
    let mut all = Checkpoint::default();
    let (hidden, dim, heads, q_rank, groups, group_width) = (64, 32, 4, 160, 2, 128);
    all.floats("embed.weight", &[96, hidden], 0.0, 1.0);
    all.floats("head.weight", &[96, hidden], 0.0, 0.5);
    all.floats("norm.weight", &[hidden], 1.0, 0.3);
    all.streams("hc_head", 4, 1, hidden);
    for layer in 0..3 {
        let name = |tensor: &str| format!("layers.{layer}.{tensor}");
        all.norm(&name("attn_norm"), hidden);
        all.norm(&name("ffn_norm"), hidden);
        all.streams(&name("hc_attn"), 24, 3, hidden);
        all.streams(&name("hc_ffn"), 24, 3, hidden);
        all.fp8(&name("attn.wq_a"), q_rank, hidden);
        all.norm(&name("attn.q_norm"), q_rank);
        all.fp8(&name("attn.wq_b"), heads * dim, q_rank);
        all.fp8(&name("attn.wkv"), dim, hidden);
        all.norm(&name("attn.kv_norm"), dim);
        all.floats(&name("attn.attn_sink"), &[heads], 0.0, 1.0);
        all.fp8(&name("attn.wo_a"), groups * group_width, heads / groups * dim);
        all.fp8(&name("attn.wo_b"), hidden, groups * group_width);
        match layer {
            1 => {
                all.compressor(&name("attn.compressor"), 4, 2 * dim, dim, hidden);
                all.compressor(&name("attn.indexer.compressor"), 4, 2 * 16, 16, hidden);
                all.fp8(&name("attn.indexer.wq_b"), 3 * 16, q_rank);
                all.floats(&name("attn.indexer.weights_proj.weight"), &[3, hidden], 0.0, 0.2);
            }
            2 => all.compressor(&name("attn.compressor"), 16, dim, dim, hidden),
            _ => {}
        }
        all.floats(&name("ffn.gate.weight"), &[4, hidden], 0.0, 0.3);
        match layer {
            0 => {
                let ids =
                    (0..96 * 2i64).flat_map(|index| ((index * 3 + index / 2) % 4).to_le_bytes()).collect();
                all.add(&name("ffn.gate.tid2eid"), (Dtype::I64, vec![96, 2], ids));
            }
            _ => all.floats(&name("ffn.gate.bias"), &[4], 0.0, 0.5),
        }
        for expert in 0..4 {
            let name = |matrix: &str| name(&format!("ffn.experts.{expert}.{matrix}"));
            all.fp4(&name("w1"), 64, hidden);
            all.fp4(&name("w2"), hidden, 64);
            all.fp4(&name("w3"), 64, hidden);
        }
        let name = |matrix: &str| name(&format!("ffn.shared_experts.{matrix}"));
        all.fp8(&name("w1"), 64, hidden);
        all.fp8(&name("w2"), hidden, 64);
        all.fp8(&name("w3"), 64, hidden);
    }
    all.floats("mtp.0.e_proj.weight", &[hidden, hidden], 0.0, 1.0);
    all
}

fn quantised() -> Value {
    small(&json!({
        "torch_dtype": "float32", "expert_dtype": "fp4", "quantization_config": {
            "quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
    }))
}

fn refusal(dir: &Path) -> String {
    try_load_on(device(), dir, Auto).err().expect("the checkpoint is refused").to_string()
}

/// The codes and scales of a published checkpoint give the answers of the numbers that they stand for.
#[test]
fn matrices_of_eight_and_of_four_bits_are_the_numbers_that_they_stand_for() {
    let all = checkpoint();
    let run = |dir: &Path| {
        let mut model = try_load_on(device().with_quantised_activations(false), dir, Auto).unwrap();
        let described = model.describe();
        model.allocate_planes(PAGES, SLOTS).unwrap();
        let prompt: Vec<u32> = prompt(45).iter().map(|token| token % 96).collect();
        (generate(&mut *model, &[&prompt], usize::MAX, 8).remove(0), described)
    };
    let published = Checkpoint::write(&quantised(), &all.published);
    let widened = Checkpoint::write(&small(&json!({})), &all.widened);
    let ((tokens, scores), described) = run(published.path());
    let ((want, want_scores), _) = run(widened.path());
    assert!(described.contains("as stored"), "{described}");
    assert_eq!(tokens, want);
    let off = scores.iter().zip(&want_scores).map(|(a, b)| (a.logprob - b.logprob).abs()).fold(0.0, f32::max);
    assert!(off < 1e-4, "logprobs are {off} apart");
}

#[test]
fn scales_and_tables_that_do_not_fit_are_named() {
    let refused = |name: &str, change: &dyn Fn(&mut Tensor)| {
        let mut all = checkpoint();
        change(all.published.get_mut(name).unwrap());
        refusal(Checkpoint::write(&quantised(), &all.published).path())
    };
    let scale = |tensor: &mut Tensor| *tensor = (Dtype::F8_E8M0, vec![2, 2], vec![127; 4]);
    for (name, words) in [
        ("layers.0.attn.wq_a.scale", "[2, 2], but config.json asks for [2, 1]"),
        ("layers.2.ffn.experts.3.w1.scale", "[2, 2], but config.json asks for [64, 2]"),
    ] {
        let error = refused(name, &scale);
        assert!(error.contains(name) && error.contains(words), "{error}");
    }
    let table = "layers.0.ffn.gate.tid2eid";
    for (number, words) in
        [(4i64, "has the index 4 in row 0, of 4"), (-1, "has the index -1"), (1, "twice in row 0")]
    {
        // Row 0 has the experts 0 and 3.
        let error = refused(table, &|tensor| {
            tensor.2[..8].copy_from_slice(&number.to_le_bytes());
            tensor.2[8..16].copy_from_slice(&1i64.to_le_bytes());
        });
        assert!(error.contains(table) && error.contains(words), "{error}");
    }
    let error = refused(table, &|tensor| tensor.0 = Dtype::F64);
    assert!(error.contains(table) && error.contains("F64; supported: I64"), "{error}");
}

#[test]
fn every_tensor_is_named_if_it_is_missing() {
    let all = checkpoint();
    let draft = |name: &str| name.starts_with("mtp.");
    for name in all.widened.keys().filter(|name| !draft(name)) {
        let mut tensors = all.widened.clone();
        tensors.remove(name);
        let error = refusal(Checkpoint::write(&small(&json!({})), &tensors).path());
        assert!(error.contains(name.as_str()), "{name}: {error}");
    }
    let mut tensors = all.widened.clone();
    tensors.retain(|name, _| !draft(name));
    try_load_on(device(), Checkpoint::write(&small(&json!({})), &tensors).path(), Auto).unwrap();
}
