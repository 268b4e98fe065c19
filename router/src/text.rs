//! Text to tokens and back: tokenizer, chat template, incremental detokenisation, stop strings.

pub mod detokenizer;
pub mod pool;
mod segments;
pub mod stop;
pub mod template;
pub mod tokenizer;
