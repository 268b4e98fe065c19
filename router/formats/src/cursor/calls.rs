//! Calls as a reader meets them: what turns out to be none is given back as text.

use super::{Break, Cursor, Shared};
use crate::output::Output;

impl Cursor {
    /// Reads a call, or a block of calls, that begins with the marker that was taken last. If it is none, its text
    /// belongs to the present channel. `Err` at the end of the output.
    pub async fn attempt(&self, read: impl Future<Output = Result<(), Break>>) -> Result<(), Break> {
        self.keep_marker();
        self.settle(read).await.map(|_| ())
    }

    /// Does the same for a call that begins here. Returns false if it is none.
    pub async fn attempt_here(&self, read: impl Future<Output = Result<(), Break>>) -> Result<bool, Break> {
        self.with(|shared| shared.buffer.anchor_here());
        self.settle(read).await
    }

    async fn settle(&self, read: impl Future<Output = Result<(), Break>>) -> Result<bool, Break> {
        let result = read.await;
        self.with(|Shared { buffer, output, .. }| {
            let kept = buffer.release();
            match result {
                Ok(()) => {}
                Err(Break::End) if output.in_call() => {}
                Err(_) => {
                    if output.in_call() {
                        output.end_call();
                    }
                    output.text(kept);
                    if result == Err(Break::End) {
                        // Nobody reads on, so a possible beginning of a marker is text, too.
                        let rest = buffer.rest().len();
                        output.text(buffer.rest());
                        buffer.consume(rest);
                    }
                }
            }
        });
        match result {
            Err(Break::End) => Err(Break::End),
            Err(Break::Malformed) => Ok(false),
            Ok(()) => Ok(true),
        }
    }

    /// Keeps the text from the last marker on, to be given back if it breaks its call.
    pub fn keep_marker(&self) {
        self.with(|shared| shared.buffer.anchor());
    }

    /// Keeps nothing: what was read is certain.
    pub fn keep_nothing(&self) {
        self.with(|shared| _ = shared.buffer.release());
    }

    /// Says that the block has begun for certain: its opening marker is no text.
    pub fn enter_block(&self) {
        self.keep_nothing();
        self.output(Output::enter_block);
    }

    /// Begins a call: from here on, what the model writes is a part of it.
    pub fn begin_call(&self, name: String, id: Option<String>) {
        self.keep_nothing();
        self.output(|output| output.begin_call(name, id));
    }

    /// Passes a fragment of arguments on.
    pub fn arguments(&self, fragment: &str) {
        self.output(|output| output.arguments(fragment));
    }

    /// Ends a call.
    pub fn end_call(&self) {
        self.output(Output::end_call);
    }
}
