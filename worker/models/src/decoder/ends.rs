//! The two ends of a decoder: the embedding before the layers, and the final norm and the LM head after them.
//!
//! The ranks of a group divide the vocabulary of the embedding and of the LM head, as in Megatron (arXiv:1909.08053).

use tutti_kernels::{Device, Norm, collective::GroupRank};

use super::TextShape;
use crate::{
    LoadError,
    weights::{Cut, Loader, Role, SafetensorsDir, Source, TensorSpec},
};

/// The tensors of the embedding, the final norm and the LM head.
pub(crate) struct EndSpecs {
    pub embedding: TensorSpec,
    /// `None` if the embedding is also the LM head.
    lm_head: Option<TensorSpec>,
    final_norm: TensorSpec,
}

impl EndSpecs {
    /// Declares the tensors. Files hold against a config that ties the LM head to the embedding, as in Hugging Face's
    /// transformers: an LM head that differs from the embedding is kept, and an LM head alone is the embedding, too.
    pub fn new(shape: &TextShape, source: &mut Source, group_rank: GroupRank) -> Self {
        let (mut tied, head) = (shape.tied, shape.lm_head);
        let mut embedding = Self::embedding_name(shape);
        if let (Source::Files(files), true) = (source, tied) {
            match files.are_equal(&embedding, head) {
                Some(false) => {
                    tied = false;
                    if group_rank.is_leader() {
                        tracing::warn!(
                            "config.json says tie_word_embeddings, but the files have {head}, which differs from \
                             {embedding}: the model uses both; tie_word_embeddings: false silences this"
                        );
                    }
                }
                Some(true) => files.mark_used(head),
                None if !files.has(&embedding) && files.has(head) => embedding = head.to_owned(),
                None => {}
            }
        }
        Self::named(shape, embedding, tied)
    }

    /// Declares the fewest tensors that the files may mean: an LM head beside a tied embedding is taken for equal.
    /// Reads no tensor.
    pub fn fewest(shape: &TextShape, source: &Source) -> Self {
        let (named, head) = (Self::embedding_name(shape), shape.lm_head);
        let is_head = |files: &SafetensorsDir| shape.tied && !files.has(&named) && files.has(head);
        let embedding = match source {
            Source::Files(files) if is_head(files) => head.to_owned(),
            Source::Files(_) | Source::Gguf(_) | Source::Dummy(_) => named,
        };
        Self::named(shape, embedding, shape.tied)
    }

    fn embedding_name(shape: &TextShape) -> String {
        format!("{}{}", shape.prefix, shape.embedding)
    }

    fn named(shape: &TextShape, embedding: String, tied: bool) -> Self {
        let TextShape { prefix, lm_head, hidden_size: hidden, .. } = *shape;
        let vocabulary = shape.limits.vocab_size;
        let table =
            |name, role| TensorSpec::matrix(name, role, vocabulary, hidden).cut(Cut::Rows(vocabulary));
        Self {
            embedding: table(embedding, Role::Embedding),
            lm_head: (!tied).then(|| table(lm_head.to_owned(), Role::Projection)),
            final_norm: TensorSpec::vector(format!("{prefix}norm.weight"), Role::Norm, hidden)
                .with_values(shape.norm_values),
        }
    }

    /// Returns all tensors, in the order of loading.
    pub fn all(&self) -> impl Iterator<Item = &TensorSpec> {
        [Some(&self.embedding), self.lm_head.as_ref(), Some(&self.final_norm)].into_iter().flatten()
    }

    pub(super) fn load<D: Device>(&self, loader: &mut Loader<'_, D>, eps: f32) -> Result<Ends<D>, LoadError> {
        let embedding = match self.lm_head {
            Some(_) => loader.table(&self.embedding)?,
            None => loader.tied(&self.embedding)?,
        };
        Ok(Ends {
            embedding,
            lm_head: self.lm_head.as_ref().map(|spec| loader.head(spec)).transpose()?,
            final_norm: loader.vector(&[&self.final_norm])?,
            eps,
        })
    }
}

/// The weights of the embedding, the final norm and the LM head. In the shapes below, `vocabulary` is the size of this
/// rank's share.
pub(super) struct Ends<D: Device> {
    /// `[vocabulary, hidden]`.
    pub embedding: D::Matrix,
    lm_head: Option<D::Matrix>,
    final_norm: D::Vector,
    eps: f32,
}

impl<D: Device> Ends<D> {
    /// Returns the LM head, `[vocabulary, hidden]`. It is the embedding matrix if the two are tied.
    pub fn lm_head(&self) -> &D::Matrix {
        self.lm_head.as_ref().unwrap_or(&self.embedding)
    }

    pub fn final_norm(&self) -> Norm<'_, D::Vector> {
        Norm { weight: &self.final_norm, eps: self.eps }
    }
}
