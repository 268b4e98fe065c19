//! Text to tokens and back: tokenizer, chat template, incremental detokenisation, stop strings.

pub mod detokenizer;
pub mod dialect;
pub mod pool;
pub mod quoting;
mod segments;
pub mod special;
pub mod stop;
pub mod template;
pub mod tokenizer;
