//! Structs in device memory, with the layout that the kernels' sources declare.

/// A struct of 32-bit words without padding, which is copied to the GPU unchanged.
///
/// # Safety
///
/// The struct has the layout of C, and all of its bytes belong to fields that are `u32`, `f32` or `u64`.
pub(super) unsafe trait Record: Copy {
    /// Number of words.
    const WORDS: usize = size_of::<Self>() / size_of::<u32>();

    /// The words, in the order of the fields.
    fn words(&self) -> &[u32] {
        // SAFETY: the struct consists of that many initialised words, and its alignment is a word's at least.
        unsafe { std::slice::from_raw_parts((&raw const *self).cast(), Self::WORDS) }
    }

    /// Reads the struct from the first bytes.
    fn of_bytes(bytes: &[u8]) -> Self {
        assert!(bytes.len() >= size_of::<Self>(), "{} bytes for a struct of more", bytes.len());
        // SAFETY: there are enough bytes, and any bytes are valid words.
        unsafe { bytes.as_ptr().cast::<Self>().read_unaligned() }
    }
}

/// Returns the number of words of a field. It accepts only types that consist of words.
const fn words_of<T: Words>() -> usize {
    T::COUNT
}

/// Types that a field can have.
trait Words {
    const COUNT: usize;
}

impl Words for u32 {
    const COUNT: usize = 1;
}

impl Words for f32 {
    const COUNT: usize = 1;
}

impl Words for u64 {
    const COUNT: usize = 2;
}

/// Declares structs of words, and checks that they have no padding.
macro_rules! records {
    ($($(#[$of_struct:meta])* struct $name:ident { $($(#[$of_field:meta])* $field:ident: $kind:ty,)+ })+) => {$(
        $(#[$of_struct])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, PartialEq)]
        pub(super) struct $name {
            $($(#[$of_field])* pub(super) $field: $kind,)+
        }

        const _: () = assert!(
            4 * (0 $(+ words_of::<$kind>())+) == size_of::<$name>(),
            concat!(stringify!($name), " has padding"),
        );

        // SAFETY: the layout is that of C, the fields are words, and there is no padding between them.
        unsafe impl Record for $name {}
    )+};
}

records! {
    /// One request's share of a step: `Row` in `sources/prelude.cuh`.
    struct Row {
        first_token: u32,
        /// Position of the first token.
        start: u32,
        /// Index of the first entry in the step's list of pages.
        first_page: u32,
        slot: u32,
    }

    /// The work of one thread block per kv head: `Item` in `sources/attention_tiles.cu`.
    struct Item {
        row: u32,
        /// Index of the tile's first query in its row.
        first: u32,
        queries: u32,
        split: u32,
        /// Index of the first query's partial result.
        part: u32,
    }

    /// Queries of a segment of rows, the work of one thread block per head: `Tile` in `sources/segment_attention.cu`.
    struct SegmentTile {
        /// First row of the segment.
        first: u32,
        /// The row behind the segment.
        end: u32,
        /// Row of the first query.
        query: u32,
    }

    /// One request to sample: `Task` in `sources/sample.cu`. A list is given by the index of its first word and its
    /// length.
    struct Task {
        seed: u64,
        position: u64,
        row: u32,
        slot: u32,
        continues: u32,
        scores: u32,
        temperature: f32,
        min_p: f32,
        top_p: f32,
        repetition: f32,
        presence: f32,
        frequency: f32,
        top_k: u32,
        tops: u32,
        first_top: u32,
        bias: u32,
        bias_count: u32,
        forbidden: u32,
        forbidden_count: u32,
        prompt: u32,
        prompt_count: u32,
        output: u32,
        output_count: u32,
        adjusts: u32,
        result: u32,
        /// First word of the mask; 0 if there is none.
        allowed: u32,
    }

    /// One row of a nomination: `Nomination` in `sources/nominate.cu`. Lists are given as in [`Task`].
    struct NominationTask {
        row: u32,
        count: u32,
        temperature: f32,
        repetition: f32,
        presence: f32,
        frequency: f32,
        adjusts: u32,
        /// First word of the mask of the whole vocabulary; 0 if there is none.
        allowed: u32,
        bias: u32,
        bias_count: u32,
        forbidden: u32,
        forbidden_count: u32,
        repeated: u32,
        repeated_count: u32,
        counted: u32,
        counted_count: u32,
    }

    /// A known token in a row of logits: `ScoreTask` in `sources/sample.cu`.
    struct ScoreTask {
        row: u32,
        token: u32,
        tops: u32,
        first_top: u32,
    }

    /// The result of a sampled or scored row: `Result` in `sources/logits.cuh`.
    struct RowResult {
        token: u32,
        status: u32,
        /// Logit of the token, before penalties and bias.
        logit: f32,
        /// Largest logit of the row.
        largest: f32,
        /// Sum of `exp(logit - largest)`, in units of 2^-44.
        sum: u64,
        rank: u32,
        /// Number of likeliest tokens that belong to the row.
        tops: u32,
    }

    /// One of the likeliest tokens of a row: `Top` in `sources/logits.cuh`.
    struct Top {
        token: u32,
        logit: f32,
    }
}
