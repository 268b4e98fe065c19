//! Attention over a window of recent tokens and over compressed entries, each of which stands for several tokens.
//!
//! One head of `head_dim` elements is key and value of all query heads. The last elements of each head are rotated in
//! adjacent pairs, and the output is rotated back. Reference: transformers
//! `models/deepseek_v4/modular_deepseek_v4.py`.

use super::dense::Norm;
use super::family::family;
use super::rotary::{RopeFrequencies, Rotary};
use crate::{Device, DeviceError, WeightType};

/// The sizes of a compressor, which turns each `ratio` tokens (a *window*) into one entry of `width` elements.
///
/// A token's projections are `[k | gate]`, each `parts * width` wide. With two parts the windows overlap: the first
/// part serves the entry of the next window, and the second part the entry of the token's own window.
///
/// A request's state of one layer is a running softmax for each part that is open, and for the first part of the window
/// before, all in f32: `[maximum | sum | weighted sum]`, each `width` wide. With two parts the order is: first part of
/// the window before, first part, second part. A sum of 0 means an empty state, so a slot of zeros is empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompressorShape {
    /// Number of tokens per entry. Divides the tokens of a page.
    pub ratio: usize,
    /// Elements per entry.
    pub width: usize,
    /// 2 if the windows overlap, else 1.
    pub parts: usize,
}

impl CompressorShape {
    /// Number of elements of a token's projections.
    pub fn projected(&self) -> usize {
        2 * self.parts * self.width
    }

    /// Number of running softmaxes of a layer's state.
    pub fn states(&self) -> usize {
        if self.parts == 2 { 3 } else { 1 }
    }

    /// Bytes of a layer's state in a slot.
    pub fn state_bytes(&self) -> usize {
        self.states() * 3 * self.width * size_of::<f32>()
    }
}

/// The operands of [`Compressed::compress`].
pub struct Compress<'a, T, V, P> {
    /// Projections of the step's tokens, `[tokens, shape.projected()]`.
    pub projected: &'a T,
    /// The sizes of the compressor.
    pub shape: CompressorShape,
    /// Terms of the gates by the token's place in its window, `[ratio, parts * width]`.
    pub offsets: &'a V,
    /// Norm of an entry.
    pub norm: Norm<'a, V>,
    /// Rotation of the last elements of an entry, at the position of its first token.
    pub rope: &'a RopeFrequencies,
    /// Planes that receive the entries and hold the states.
    pub planes: &'a mut P,
    /// Index of the plane of entries.
    pub entries: usize,
    /// Index of the slot plane with the states.
    pub states: usize,
    /// Index of the layer in both planes.
    pub layer: usize,
}

/// The norm of each head before its rotation.
pub enum TailNorm<'a, V> {
    /// None.
    None,
    /// `x / sqrt(mean(x²) + eps)`.
    Unweighted {
        /// Epsilon that is added to the mean square.
        eps: f32,
    },
    /// With a weight for every head, `[head_dim]`.
    Weighted(Norm<'a, V>),
}

/// The operands of [`Compressed::rotate_tails`].
pub struct RotateTails<'a, T, V> {
    /// Heads of the step's tokens, `[tokens, heads * head_dim]`.
    pub x: &'a mut T,
    /// Elements per head.
    pub head_dim: usize,
    /// Norm of each head before the rotation.
    pub norm: TailNorm<'a, V>,
    /// Angles of the step's tokens. They are as wide as the rotated elements, which are the last ones of a head.
    pub rotary: Rotary<'a, T>,
    /// True to rotate by the negative angles.
    pub inverse: bool,
}

/// The heads of a layer with a window.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WindowShape {
    /// Number of query heads.
    pub heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Factor by which q·k is multiplied.
    pub scale: f32,
    /// Number of tokens that a query sees, including its own.
    pub window: usize,
    /// Storage type of the window's tokens in a slot.
    pub dtype: WeightType,
}

impl WindowShape {
    /// Bytes of a layer's window in a slot: a ring of tokens, at index `position mod window`.
    pub fn ring_bytes(&self) -> usize {
        self.window * self.head_dim * self.dtype.bytes()
    }
}

/// The choice of the entries that a token attends to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexerShape {
    /// Number of heads.
    pub heads: usize,
    /// Elements per head, and per entry of the indexer's plane.
    pub head_dim: usize,
    /// Number of entries that a token attends to, at most.
    pub top_k: usize,
}

/// The operands of the choice of entries. The score of a visible entry `e` is
/// `Σ_h weights[h] * heads^-½ * relu(queries[h] · e) * head_dim^-½`. Chosen are the entries with the largest scores; of
/// equal scores the lower index wins.
pub struct Indexer<'a, T> {
    /// Rotated queries of the step's tokens, `[tokens, heads * head_dim]`.
    pub queries: &'a T,
    /// Weight of each head, `[tokens, heads]`.
    pub weights: &'a T,
    /// The indexer's sizes.
    pub shape: IndexerShape,
    /// Index of the plane of the indexer's entries.
    pub entries: usize,
}

/// The compressed entries that a layer attends to.
pub struct AttendedEntries<'a, T> {
    /// Index of the plane of entries.
    pub entries: usize,
    /// Index of the layer in the plane, and in the indexer's plane.
    pub layer: usize,
    /// The choice of entries; `None` if a token attends to all visible entries.
    pub indexer: Option<Indexer<'a, T>>,
}

/// The operands of [`Compressed::window_attention`].
pub struct WindowAttention<'a, T, V, P> {
    /// Rotated queries of the step's tokens, `[tokens, heads * head_dim]`.
    pub q: &'a T,
    /// Rotated keys, which are also the values, `[tokens, head_dim]`.
    pub kv: &'a T,
    /// The layer's heads.
    pub shape: WindowShape,
    /// Sink of each head: a logit whose probability is dropped.
    pub sinks: &'a V,
    /// Planes that hold windows and entries.
    pub planes: &'a P,
    /// Index of the slot plane with the windows.
    pub window: usize,
    /// Index of the layer in that plane.
    pub layer: usize,
    /// Compressed entries, which a token attends to in addition to its window.
    pub compressed: Option<AttendedEntries<'a, T>>,
}

/// The operands of [`Compressed::store_window`].
pub struct StoreWindow<'a, T, P> {
    /// Rotated keys of the step's tokens, `[tokens, head_dim]`.
    pub kv: &'a T,
    /// The layer's heads.
    pub shape: WindowShape,
    /// Planes that hold the windows.
    pub planes: &'a mut P,
    /// Index of the slot plane with the windows.
    pub window: usize,
    /// Index of the layer in that plane.
    pub layer: usize,
}

family! {
    /// Windows and compressed entries. The order of all operations is the same in prefill and in decode and depends on
    /// absolute positions alone, so neither chunks nor the other rows of a step change a bit. Rows with the null slot
    /// change no request's state.
    pub trait Compressed {
        /// Adds each row's tokens to the states in the row's slot, in order, and writes an entry to the request's pages
        /// for each window that a token closes.
        ///
        /// Entry w is the softmax over its tokens, per channel, of `gate + offsets[position mod ratio]`, times k. With
        /// overlapping windows, the tokens are those of window w - 1 with the first part and those of window w with the
        /// second part; entry 0 has the latter alone. The entry is normed and then rotated at position `ratio * w`.
        fn compress(&mut self, compress: Compress<'_, Self::Tensor, Self::Vector, Self::Planes>)
            => |recorder| recorder.by_token();
        /// Normalises each head and rotates its last elements in adjacent pairs: element `2i` with element `2i + 1` by
        /// angle `i`.
        fn rotate_tails(&mut self, tails: RotateTails<'_, Self::Tensor, Self::Vector>)
            => |recorder| recorder.by_token();
        /// Computes the attention of each token over its window, its visible entries and the heads' sinks, in one
        /// softmax. A query at position p sees the tokens at positions `max(0, p + 1 - window) ..= p`, and entry w if
        /// and only if `w < (p + 1) / ratio`, rounded down. Keys of the step itself, which
        /// [`store_window`](Self::store_window) has not stored yet, are rounded to the type of the ring. `out` is
        /// `[tokens, heads * head_dim]`.
        fn window_attention(
            &mut self,
            attention: WindowAttention<'_, Self::Tensor, Self::Vector, Self::Planes>,
            out: &mut Self::Tensor,
        ) => |recorder| recorder.by_token();
        /// Writes the keys of each row's last tokens to the ring in the row's slot. Call it behind
        /// [`window_attention`](Self::window_attention).
        fn store_window(&mut self, window: StoreWindow<'_, Self::Tensor, Self::Planes>)
            => |recorder| recorder.by_token();
    }
}
