//! Reads the results of Hugging Face transformers that tests/goldens has recorded.

use safetensors::SafeTensors;

pub const LENGTHS: [usize; 5] = [1, 7, 37, 125, 300];

/// Maximum deviation of a logprob from the reference with f32 weights. The bound of delta nets is larger, because the
/// reference prefills in chunks and decodes recurrently, and these two results differ by up to 1.2e-4.
pub fn bound(model: &str) -> f64 {
    if model.starts_with("qwen3_5") { 1e-3 } else { 2e-4 }
}

pub struct Case {
    pub prompt: Vec<u32>,
    pub greedy: Vec<u32>,
    /// Logits of all prompt tokens, `[prompt, vocab]`.
    logits: Vec<f32>,
}

impl Case {
    pub fn read(goldens: &SafeTensors<'_>, length: usize) -> Self {
        Self::named(goldens, &format!("t{length}"))
    }

    pub fn named(goldens: &SafeTensors<'_>, case: &str) -> Self {
        let data = |name: &str| goldens.tensor(&format!("{case}.{name}")).unwrap().data().to_vec();
        let ids = |name| {
            let bytes = data(name);
            bytes.as_chunks::<8>().0.iter().map(|id| i64::from_le_bytes(*id) as u32).collect()
        };
        let logits = data("logits").as_chunks::<4>().0.iter().map(|x| f32::from_le_bytes(*x)).collect();
        Self { prompt: ids("input_ids"), greedy: ids("greedy"), logits }
    }

    /// Returns the reference's logprob of prompt token `i`, i ≥ 1.
    pub fn logprob(&self, i: usize) -> f64 {
        let vocab = self.logits.len() / self.prompt.len();
        let row: Vec<f64> = self.logits[(i - 1) * vocab..i * vocab].iter().map(|x| f64::from(*x)).collect();
        let most = row.iter().copied().fold(f64::MIN, f64::max);
        row[self.prompt[i] as usize] - most - row.iter().map(|x| (x - most).exp()).sum::<f64>().ln()
    }
}
