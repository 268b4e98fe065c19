//! A quantised matrix of a checkpoint, and its products in plain arithmetic.

use tutti_kernels::{GroupOffsets, QuantizedRows, QuantizedType, ScaleType, WeightType};

use crate::support::{Random, stored};

/// A quantised matrix of a checkpoint.
pub struct Source {
    pub element: QuantizedType,
    pub rows: usize,
    pub columns: usize,
    pub group: usize,
    pub rows_per_scale: usize,
    /// One code per weight.
    pub codes: Vec<u8>,
    pub packed: Vec<u8>,
    pub scales: Vec<f32>,
    pub scale_type: ScaleType,
    pub zeros: Option<Vec<u8>>,
    pub minima: Option<Vec<f32>>,
}

impl Source {
    /// A matrix with random codes and scales.
    pub fn random(
        random: &mut Random,
        element: QuantizedType,
        (rows, columns): (usize, usize),
        (rows_per_scale, group): (usize, usize),
        (scale_type, has_zeros): (ScaleType, bool),
    ) -> Self {
        let codes: Vec<u8> = (0..rows * columns)
            .map(|_| {
                loop {
                    let code = random.below(1 << element.bits()) as u8;
                    if element != QuantizedType::E4m3 || code & 0x7f != 0x7f {
                        break code;
                    }
                }
            })
            .collect();
        let count = rows.div_ceil(rows_per_scale) * columns.div_ceil(group);
        let values = floats(random, scale_type, count);
        let integers = matches!(element, QuantizedType::Int4 | QuantizedType::Int8);
        let zeros = (has_zeros && integers).then(|| {
            let ends = if element == QuantizedType::Int4 { [0, 15] } else { [0x80, 0x7f] };
            let zero = |index| if index % 5 == 0 { ends[index % 2] } else { random.below(16) as u8 };
            (0..count).map(zero).collect()
        });
        let source = Self::new(element, (rows, columns), (rows_per_scale, group), codes, values, zeros);
        Self { scale_type, ..source }
    }

    pub fn new(
        element: QuantizedType,
        (rows, columns): (usize, usize),
        (rows_per_scale, group): (usize, usize),
        codes: Vec<u8>,
        scales: Vec<f32>,
        zeros: Option<Vec<u8>>,
    ) -> Self {
        let packed = match element.bits() {
            8 => codes.clone(),
            _ => codes
                .chunks(columns)
                .flat_map(|row| row.chunks(2))
                .map(|pair| pair[0] | pair.get(1).unwrap_or(&9) << 4)
                .collect(),
        };
        let scale_type = ScaleType::F32;
        let minima = None;
        Self {
            element,
            rows,
            columns,
            group,
            rows_per_scale,
            codes,
            packed,
            scales,
            scale_type,
            zeros,
            minima,
        }
    }

    /// Returns these codes and scales with random minima.
    pub fn with_minima(self, random: &mut Random) -> Self {
        let minima = Some(floats(random, self.scale_type, self.scales.len()));
        Self { zeros: None, minima, ..self }
    }

    pub fn view(&self) -> QuantizedRows<'_> {
        let Self { element, rows, columns, group, rows_per_scale, .. } = *self;
        QuantizedRows {
            codes: &self.packed,
            element,
            rows,
            columns,
            stride: (columns * element.bits()).div_ceil(8),
            group,
            rows_per_scale,
            scales: &self.scales,
            scale_type: self.scale_type,
            offsets: match (&self.zeros, &self.minima) {
                (Some(zeros), _) => GroupOffsets::ZeroPoints(zeros),
                (None, Some(minima)) => GroupOffsets::Minima(minima),
                (None, None) => GroupOffsets::None,
            },
        }
    }

    fn scale_index(&self, row: usize, column: usize) -> usize {
        row / self.rows_per_scale * self.columns.div_ceil(self.group) + column / self.group
    }

    /// The code less its zero point.
    pub fn number(&self, row: usize, column: usize) -> f64 {
        let code = self.codes[row * self.columns + column];
        let mut zero = self.zeros.as_ref().map(|zeros| zeros[self.scale_index(row, column)]);
        if self.minima.is_some() {
            zero = Some(0);
        }
        match self.element {
            QuantizedType::Int4 => f64::from(code) - f64::from(zero.unwrap_or(8)),
            QuantizedType::Int8 => f64::from(code.cast_signed()) - f64::from(zero.unwrap_or(0).cast_signed()),
            QuantizedType::E2m1 => {
                let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(code & 7)];
                if code & 8 == 0 { magnitude } else { -magnitude }
            }
            QuantizedType::E4m3 => {
                let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
                let magnitude = match exponent {
                    0 => mantissa / 8.0 * 2f64.powi(-6),
                    _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
                };
                if code & 0x80 == 0 { magnitude } else { -magnitude }
            }
        }
    }

    pub fn scale(&self, row: usize, column: usize) -> f32 {
        self.scales[self.scale_index(row, column)]
    }

    pub fn weight(&self, row: usize, column: usize) -> f64 {
        self.number(row, column) * f64::from(self.scale(row, column)) - f64::from(self.minimum(row, column))
    }

    fn minimum(&self, row: usize, column: usize) -> f32 {
        self.minima.as_ref().map_or(0.0, |minima| minima[self.scale_index(row, column)])
    }

    /// Products in double precision, with activations as they are.
    pub fn product(&self, x: &[f32]) -> Vec<f64> {
        let outputs = |x: &[f32]| -> Vec<f64> {
            let one = |row| x.iter().enumerate().map(|(i, x)| f64::from(*x) * self.weight(row, i)).sum();
            (0..self.rows).map(one).collect()
        };
        x.chunks(self.columns).flat_map(outputs).collect()
    }

    /// Number of inputs that share a scale of activations in eight bits.
    fn activation_group(&self) -> usize {
        [128, 64, 32]
            .into_iter()
            .find(|group| self.group >= self.columns || self.group.is_multiple_of(*group))
            .unwrap()
    }

    /// Reference for one output with activations in eight bits, with the documented order of operations.
    pub fn dot(&self, row: usize, x: &[f32], before: f32) -> f32 {
        let group = self.activation_group();
        x.chunks(group).enumerate().fold(before, |sum, (index, x)| {
            let (x, x_scale) = quantised(x);
            let first = index * group;
            let term = |(i, x): (usize, &i32)| self.number(row, first + i) as i32 * x;
            let dot: i32 = x.iter().enumerate().map(term).sum();
            let sum = (dot as f32).mul_add(self.scale(row, first) * x_scale, sum);
            let of_group = (-8 * x.iter().sum::<i32>()) as f32;
            match self.minima {
                None => sum,
                Some(_) => of_group.mul_add(self.minimum(row, first) / 8.0 * x_scale, sum),
            }
        })
    }
}

fn floats(random: &mut Random, kind: ScaleType, count: usize) -> Vec<f32> {
    let dtype = if kind == ScaleType::F16 { WeightType::F16 } else { WeightType::F32 };
    random.normals(count, 0.02).into_iter().map(|x| stored(dtype, x)).collect()
}

/// The quantised numbers of a group of activations, and its scale.
pub fn quantised(group: &[f32]) -> (Vec<i32>, f32) {
    let largest = group.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    if largest == 0.0 {
        return (vec![0; group.len()], 0.0);
    }
    let steps = group.iter().map(|x| (x * (127.0 / largest)).round_ties_even() as i32);
    (steps.collect(), largest / 127.0)
}
