//! A script for tests: answers that the simulated device gives instead of tokens without meaning. The checkpoint's file
//! `script.json` holds them as token ids. The cargo feature `media-test-model` adds scripts to a build.
//!
//! The state of a request is 8 bytes: the script, the turn, the position in the answer, and the part of a pattern that
//! the last tokens are. A token changes it ([`Script::extend`]), and it alone decides the next token
//! ([`Script::token`]). It takes the place of the digest in pages and slots, so a scripted answer survives chunks,
//! batches, preemption, prefix hits, hand-over and replay only if the engine keeps every position right.
//!
//! A prompt names its script by a marker, which is a sequence of token ids such as the digits of a number. The last
//! marker counts. The n-th turn of the model behind the marker has the script's n-th answer. Patterns are found by the
//! automaton of Aho and Corasick (1975).

use std::{
    collections::{HashMap, VecDeque},
    path::Path,
};

use serde::Deserialize;

use crate::{LoadError, config::read_json};

/// Name of the file in the checkpoint's directory.
const FILE: &str = "script.json";

/// The contents of [`FILE`].
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Contents {
    /// Token ids behind which an answer begins: the chat template's opening of the model's turn.
    turn: Vec<u32>,
    /// Token ids that a template may add behind `turn`, such as an empty block of thinking. They are no part of an
    /// answer.
    #[serde(default)]
    openings: Vec<Vec<u32>>,
    /// Token id that follows an answer, and every prompt without a script.
    end: u32,
    scripts: Vec<Entry>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    marker: Vec<u32>,
    /// Answers of the turns behind the marker.
    answers: Vec<Vec<u32>>,
}

/// The answers, and the automaton that finds the patterns.
pub struct Script {
    end: u32,
    /// Answers per script and turn.
    answers: Vec<Vec<Vec<u32>>>,
    /// Nodes of the automaton; the root is the first.
    nodes: Vec<Node>,
}

/// A node: the last tokens are the beginning of a pattern, or a whole one.
#[derive(Default)]
struct Node {
    next: HashMap<u32, u16>,
    /// Node of the longest proper suffix that is a node, too.
    suffix: u16,
    effect: Option<Effect>,
}

/// Effect of a pattern whose last token has come.
#[derive(Clone, Copy)]
enum Effect {
    /// Chooses a script, by its index.
    Marker(u16),
    /// Begins the next turn's answer.
    Turn,
    /// Begins the same turn's answer again.
    Opening,
}

/// The state of a request, packed into 8 bytes.
#[derive(Clone, Copy, Default)]
struct State {
    node: u16,
    /// Number of the script, from 1 on. 0 means none.
    script: u16,
    /// Turns since the marker. 0 means that no answer has begun.
    turn: u16,
    /// Tokens since the answer began.
    position: u16,
}

impl State {
    fn unpack(packed: u64) -> Self {
        let [node, script, turn, position] = [0, 16, 32, 48].map(|shift| (packed >> shift) as u16);
        Self { node, script, turn, position }
    }

    fn pack(self) -> u64 {
        let [node, script, turn, position] =
            [self.node, self.script, self.turn, self.position].map(u64::from);
        node | script << 16 | turn << 32 | position << 48
    }
}

impl Script {
    /// Reads the script of a checkpoint, whose vocabulary has `vocab_size` tokens. Returns `None` if there is none.
    pub fn read(dir: &Path, vocab_size: usize) -> Result<Option<Self>, LoadError> {
        let path = dir.join(FILE);
        if !path.exists() {
            return Ok(None);
        }
        let contents = read_json(&path)?;
        Self::new(contents, vocab_size).map(Some).map_err(|problem| LoadError::Config { path, problem })
    }

    fn new(contents: Contents, vocab_size: usize) -> Result<Self, String> {
        let Contents { turn, openings, end, scripts } = contents;
        let patterns = openings.iter().chain(scripts.iter().map(|script| &script.marker)).chain([&turn]);
        if patterns.clone().any(Vec::is_empty) {
            return Err("a marker, the turn or an opening has no token".into());
        }
        let answers = scripts.iter().flat_map(|script| script.answers.iter().flatten());
        if let Some(id) =
            patterns.flatten().chain(answers).chain([&end]).find(|&&id| id as usize >= vocab_size)
        {
            return Err(format!("token id {id} of a vocabulary of {vocab_size}"));
        }
        let mut script = Self { end, answers: Vec::new(), nodes: vec![Node::default()] };
        script.add(&turn, Effect::Turn)?;
        for opening in &openings {
            script.add(&[&turn[..], opening].concat(), Effect::Opening)?;
        }
        for (index, Entry { marker, answers }) in scripts.into_iter().enumerate() {
            let index = u16::try_from(index).ok().filter(|index| *index < u16::MAX);
            script.add(&marker, Effect::Marker(index.ok_or("there are 65535 scripts or more")?))?;
            script.answers.push(answers);
        }
        script.link();
        Ok(script)
    }

    /// Adds a pattern to the automaton.
    fn add(&mut self, pattern: &[u32], effect: Effect) -> Result<(), String> {
        let mut node = 0;
        for token in pattern {
            let fresh =
                u16::try_from(self.nodes.len()).map_err(|_| "the patterns have 65536 tokens or more")?;
            let next = *self.nodes[node].next.entry(*token).or_insert(fresh);
            if next == fresh {
                self.nodes.push(Node::default());
            }
            node = usize::from(next);
        }
        match self.nodes[node].effect.replace(effect) {
            Some(_) => Err(format!("the pattern {pattern:?} stands twice")),
            None => Ok(()),
        }
    }

    /// Sets each node's suffix, in the order of their depth. A node without an effect has its suffix's.
    fn link(&mut self) {
        let mut queue: VecDeque<u16> = self.nodes[0].next.values().copied().collect();
        while let Some(node) = queue.pop_front() {
            let next: Vec<(u32, u16)> =
                self.nodes[usize::from(node)].next.iter().map(|(token, next)| (*token, *next)).collect();
            for (token, child) in next {
                let suffix = self.follow(self.nodes[usize::from(node)].suffix, token);
                let effect = self.nodes[usize::from(suffix)].effect;
                let child_node = &mut self.nodes[usize::from(child)];
                child_node.suffix = suffix;
                child_node.effect = child_node.effect.or(effect);
                queue.push_back(child);
            }
        }
    }

    /// Returns the node behind `node` and a token.
    fn follow(&self, mut node: u16, token: u32) -> u16 {
        loop {
            let Node { next, suffix, .. } = &self.nodes[usize::from(node)];
            match next.get(&token) {
                Some(next) => return *next,
                None if node == 0 => return 0,
                None => node = *suffix,
            }
        }
    }

    /// Returns the state of a sequence extended by one token.
    pub fn extend(&self, packed: u64, token: u32) -> u64 {
        let mut state = State::unpack(packed);
        state.node = self.follow(state.node, token);
        match self.nodes.get(usize::from(state.node)).and_then(|node| node.effect) {
            Some(Effect::Marker(index)) => {
                state = State { node: state.node, script: index + 1, ..State::default() };
            }
            Some(Effect::Turn) => (state.turn, state.position) = (state.turn.saturating_add(1), 0),
            Some(Effect::Opening) => state.position = 0,
            None => state.position = state.position.saturating_add(1),
        }
        state.pack()
    }

    /// Returns the token that follows a sequence.
    pub fn token(&self, packed: u64) -> u32 {
        let State { script, turn, position, .. } = State::unpack(packed);
        let index = |number: u16| usize::from(number).checked_sub(1);
        let answer = index(script)
            .and_then(|index| self.answers.get(index))
            .and_then(|answers| answers.get(index(turn)?));
        answer.and_then(|answer| answer.get(usize::from(position))).copied().unwrap_or(self.end)
    }
}

#[cfg(test)]
mod tests;
