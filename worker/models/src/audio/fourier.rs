//! The discrete Fourier transform of a fixed length, by its prime factors (Cooley and Tukey, 1965).

use std::f64::consts::TAU;

/// A complex number: real and imaginary part.
pub(super) type Complex = [f64; 2];

/// The transform of a length.
pub(super) struct Fourier {
    /// Prime factors of the length, ascending.
    factors: Vec<usize>,
    /// Powers of the primitive root `e^(-2πi / length)`.
    roots: Vec<Complex>,
}

impl Fourier {
    pub fn new(length: usize) -> Self {
        let (mut factors, mut rest) = (Vec::new(), length.max(1));
        let mut factor = 2;
        while rest > 1 {
            while rest.is_multiple_of(factor) {
                factors.push(factor);
                rest /= factor;
            }
            factor += 1;
        }
        let root = |index: usize| {
            let (sin, cos) = (TAU * index as f64 / length as f64).sin_cos();
            [cos, -sin]
        };
        Self { factors, roots: (0..length).map(root).collect() }
    }

    /// Transforms `input`, which has the transform's length.
    pub fn run(&self, input: &[f64]) -> Vec<Complex> {
        let mut out = vec![[0.0; 2]; self.roots.len()];
        self.part(input, 1, &self.factors, &mut out);
        out
    }

    /// Transforms every `stride`-th element of `input`, as many as `out` holds.
    fn part(&self, input: &[f64], stride: usize, factors: &[usize], out: &mut [Complex]) {
        let Some((&factor, rest)) = factors.split_first() else {
            return out.iter_mut().zip(input).for_each(|(out, x)| *out = [*x, 0.0]);
        };
        let length = out.len() / factor;
        for (index, out) in out.chunks_exact_mut(length).enumerate() {
            self.part(&input[index * stride..], stride * factor, rest, out);
        }
        let mut column = vec![[0.0; 2]; factor];
        for bin in 0..length {
            column.iter_mut().enumerate().for_each(|(index, x)| *x = out[index * length + bin]);
            for (target, sum) in (bin..out.len()).step_by(length).zip(0..factor) {
                let bin = sum * length + bin;
                out[target] =
                    column.iter().enumerate().fold([0.0; 2], |[real, imaginary], (index, [a, b])| {
                        let [c, d] = self.roots[index * bin * stride % self.roots.len()];
                        [real + a * c - b * d, imaginary + a * d + b * c]
                    });
            }
        }
    }
}
