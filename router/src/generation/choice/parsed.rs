//! Choices whose output is read into reasoning, content and calls.

use tutti_formats::{Event, Parser};

use super::{Choice, ChoiceSettings, Delta, OutputToken};
use crate::{generation::finish::Reason, text::detokenizer::Detokenizer};

impl Choice {
    /// Reads a token into parts of the answer. Tokens are not held back: their logprobs cover all parts in order, and
    /// no part is named by a position in the text. Returns a reason if the choice ends with it.
    pub(super) fn read(&mut self, token: OutputToken, out: &mut Delta) -> Option<Reason> {
        let ChoiceSettings { parser: Some(parser), detokenizer, .. } = &mut self.settings else { return None };
        let mut text = String::new();
        if let Some(detokenizer) = detokenizer {
            // The rest of a broken character belongs before a marker.
            if parser.is_marker(token.id) {
                text = detokenizer.release();
            }
            text.push_str(&detokenizer.push(token.id).text);
        }
        let events = parser.push(token.id, &text);
        let is_done = parser.is_done();
        out.tokens.push(token);
        let reason = self.add_parts(events, out);
        reason.or(is_done.then_some(Reason::OnlyCall))
    }

    /// Adds parts to `out`. Stop strings are searched in content alone. Returns a reason if one of them ended the
    /// choice.
    fn add_parts(&mut self, events: Vec<Event>, out: &mut Delta) -> Option<Reason> {
        for event in events {
            let Event::Content(text) = event else {
                // A stop string does not go on behind a call or a block of reasoning.
                let held = self.matcher.flush();
                add_content(held, out);
                if let Event::CallBegin { name, .. } = &event {
                    self.calls.all += 1;
                    self.calls.undeclared += u32::from(!self.settings.tools.declares(name));
                }
                out.add_part(event);
                continue;
            };
            let mut released = String::new();
            let stopped = self.search(&text, &mut released);
            add_content(released, out);
            if stopped.is_some() {
                return stopped;
            }
        }
        None
    }

    /// Reads the end of the output. Returns a reason if a stop string ended the choice before.
    pub(super) fn read_end(&mut self, ending: Option<OutputToken>, out: &mut Delta) -> Option<Reason> {
        let parser = self.settings.parser.as_mut()?;
        let mut rest = self.settings.detokenizer.as_mut().map(Detokenizer::flush).unwrap_or_default();
        let mut events = Vec::new();
        // The token that ends the output has no text, but may be a marker, such as the end of a call.
        if let Some(token) = ending {
            if parser.is_marker(token.id) {
                events = parser.push(token.id, &std::mem::take(&mut rest));
            }
            out.tokens.push(token);
        }
        self.reasoning_tokens = self.settings.parser.as_ref().map(Parser::reasoning_tokens);
        events.extend(self.settings.parser.take()?.finish(&rest));
        let stopped = self.add_parts(events, out);
        if stopped.is_none() {
            let held = self.matcher.flush();
            add_content(held, out);
        }
        stopped
    }
}

/// Adds content to a delta.
fn add_content(text: String, out: &mut Delta) {
    if !text.is_empty() {
        out.add_part(Event::Content(text));
    }
}
