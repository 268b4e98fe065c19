//! A vocabulary prepared for masks: the trie of its tokens and the library's slices of it.

use std::{panic::AssertUnwindSafe, sync::Arc};

use llguidance::{
    Logger, ParserFactory, TokenParser,
    api::{GrammarInit, TopLevelGrammar},
    earley::SlicedBiasComputer,
    panic_utils,
    toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie},
};

use crate::{
    constraint::Constraint,
    error::{Cause, ConstraintError},
    grammar,
    limits::{Fuel, STACK_BYTES, parser_limits},
    matcher::{Matcher, failed},
    thread,
    vocabulary::{Token, Vocabulary},
};

/// A vocabulary prepared for masks. It takes up to a second and some sixty megabytes for a vocabulary of 150,000
/// tokens, so a process builds one, at its first constrained request.
pub struct Environment {
    factory: ParserFactory,
    tokens: Arc<Tokens>,
    /// The special tokens' texts with their ids, the longest first.
    special: Vec<(String, u32)>,
}

/// The tokens, in the form that matchers need.
pub(crate) struct Tokens {
    /// Bits of the tokens that masks may have, besides the end tokens.
    pub(crate) usable: Vec<u32>,
    /// The end tokens.
    pub(crate) ends: Vec<u32>,
}

impl Environment {
    /// Prepares a vocabulary.
    pub fn new(vocabulary: &Vocabulary) -> Result<Self, ConstraintError> {
        // The trie asserts what it expects of tokens.
        let factory = panic_utils::catch_unwind(AssertUnwindSafe(|| Ok(Self::factory(vocabulary))))
            .unwrap_or_else(|e| Err(e.to_string()))
            .map_err(|message| ConstraintError::of_library("vocabulary", message))?;
        let mut usable = vec![0; vocabulary.tokens().len().div_ceil(32)];
        for (id, token) in vocabulary.tokens().iter().enumerate() {
            if *token != Token::Unused && !vocabulary.ends().contains(&(id as u32)) {
                usable[id / 32] |= 1 << (id % 32);
            }
        }
        let mut special: Vec<_> = vocabulary.special().map(|(id, text)| (text.to_owned(), id)).collect();
        special.sort_by_key(|(text, _)| std::cmp::Reverse(text.len()));
        Ok(Self { factory, tokens: Arc::new(Tokens { usable, ends: vocabulary.ends().to_vec() }), special })
    }

    /// Number of 32-bit words in a mask.
    pub fn mask_words(&self) -> usize {
        self.tokens.usable.len()
    }

    /// Compiles a constraint that has been checked, and returns the matcher at the beginning.
    ///
    /// The work is bounded. It runs on a thread of its own, because the library recurses and the caller's stack may be
    /// small.
    pub fn compile(&self, constraint: &Constraint) -> Result<Matcher, ConstraintError> {
        self.base(constraint, Fuel::OF_A_STEP).map(|parser| self.matcher(&parser))
    }

    /// Compiles a constraint and computes its first mask, on a thread with enough stack. A constraint that was checked
    /// compiles, so an error of the compilation is this process's. The mask may exceed a limit that the check did not
    /// reach with its smaller vocabulary.
    pub(crate) fn base(&self, constraint: &Constraint, fuel: Fuel) -> Result<TokenParser, ConstraintError> {
        let grammar = grammar::of(constraint, &self.special)?;
        let base = || {
            let parser = self.parser(grammar, fuel);
            let mut parser = parser.map_err(|error| ConstraintError { cause: Cause::Process, ..error })?;
            panic_utils::catch_unwind(AssertUnwindSafe(|| parser.compute_mask())).map_err(failed)?;
            Ok(parser)
        };
        thread::on_stack(STACK_BYTES, base)?
    }

    /// A matcher in the state of a parser.
    pub(crate) fn matcher(&self, parser: &TokenParser) -> Matcher {
        Matcher::copy_of(parser, Arc::clone(&self.tokens))
    }

    /// Compiles a grammar on this thread.
    pub(crate) fn parser(
        &self,
        grammar: TopLevelGrammar,
        fuel: Fuel,
    ) -> Result<TokenParser, ConstraintError> {
        let (grammar, silent) = (GrammarInit::Serialized(grammar), Logger::new(0, 0));
        let capabilities = InferenceCapabilities::default();
        let parser =
            self.factory.create_parser_from_init_ext(grammar, silent, capabilities, parser_limits(fuel));
        let mut parser = parser.map_err(failed)?;
        parser.start_without_prompt();
        Ok(parser)
    }

    /// The special tokens' texts with their ids, the longest first.
    pub(crate) fn special(&self) -> &[(String, u32)] {
        &self.special
    }

    /// The end tokens.
    pub(crate) fn ends(&self) -> &[u32] {
        &self.tokens.ends
    }

    fn factory(vocabulary: &Vocabulary) -> Result<ParserFactory, String> {
        let words = vocabulary.trie_words();
        let first_end = vocabulary.ends().first().copied().unwrap_or_default();
        let info = TokRxInfo::new(words.len() as u32, first_end);
        let trie = TokTrie::from(&info, &words).with_eos_tokens(vocabulary.ends());
        // `ApproximateTokEnv` says that it is not canonical, so the library forces no tokens. See the crate's page.
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let slices = SlicedBiasComputer::json_slices();
        ParserFactory::new(&env, InferenceCapabilities::default(), &slices).map_err(|e| e.to_string())
    }
}
