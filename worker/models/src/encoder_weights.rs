//! Weights that encoders of pictures and of sound have in common.

use tutti_kernels::{Device, LayerNorm, Linear};

use crate::{
    LoadError,
    decoder::LinearOn,
    weights::{Loader, Role, TensorSpec},
};

/// The tensors of a layer norm, or of a linear map with a bias.
pub(crate) struct Pair {
    pub weight: TensorSpec,
    pub bias: TensorSpec,
}

impl Pair {
    /// Declares a layer norm of rows of `width` elements.
    pub fn norm(module: &str, width: usize) -> Self {
        let vector = |part: &str, role| TensorSpec::vector(format!("{module}.{part}"), role, width);
        Self { weight: vector("weight", Role::Norm), bias: vector("bias", Role::Bias) }
    }

    /// Declares a linear map.
    pub fn linear(module: &str, outputs: usize, inputs: usize) -> Self {
        Self::flattened(module, &[outputs, inputs])
    }

    /// Declares a linear map whose weight has this shape in the checkpoint, as those of convolutions.
    pub fn flattened(module: &str, shape: &[usize]) -> Self {
        let outputs = shape.first().copied().unwrap_or(1);
        Self {
            weight: TensorSpec::flattened(format!("{module}.weight"), Role::Projection, shape),
            bias: TensorSpec::vector(format!("{module}.bias"), Role::Bias, outputs),
        }
    }

    pub fn tensors(&self) -> [&TensorSpec; 2] {
        [&self.weight, &self.bias]
    }
}

/// A layer norm on a device.
pub(crate) struct NormWeights<D: Device> {
    weight: D::Vector,
    bias: D::Vector,
}

impl<D: Device> NormWeights<D> {
    pub fn load(specs: &Pair, loader: &mut Loader<'_, D>) -> Result<Self, LoadError> {
        Ok(Self { weight: loader.vector(&[&specs.weight])?, bias: loader.vector(&[&specs.bias])? })
    }

    pub fn operands(&self, eps: f32) -> LayerNorm<'_, D::Vector> {
        LayerNorm { weight: &self.weight, bias: &self.bias, eps }
    }
}

/// A linear map with a bias on a device.
pub(crate) struct LinearWeights<D: Device> {
    weight: D::Matrix,
    bias: D::Vector,
}

impl<D: Device> LinearWeights<D> {
    /// Loads linear maps of the same input as one map, whose outputs are those of the maps in order.
    pub fn load(specs: &[&Pair], loader: &mut Loader<'_, D>) -> Result<Self, LoadError> {
        let weights: Vec<_> = specs.iter().map(|pair| &pair.weight).collect();
        let biases: Vec<_> = specs.iter().map(|pair| &pair.bias).collect();
        Ok(Self { weight: loader.matrix(&weights)?, bias: loader.vector(&biases)? })
    }

    pub fn operands<'a>(&'a self, x: &'a D::Tensor) -> LinearOn<'a, D> {
        Linear { bias: Some(&self.bias), ..Linear::plain(x, &self.weight) }
    }
}
