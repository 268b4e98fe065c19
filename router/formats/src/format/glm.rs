//! GLM-4.5 to 5: `<tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>`, before 4.7 with newlines
//! between.

use std::sync::Arc;

use super::{CallFormat, Trigger};
use crate::{
    bodies::{Attributes, Tags, tagged_call},
    cursor::{Break, Cursor, Lexicon, Markers},
    tools::Tools,
};

pub(crate) struct Glm {
    tools: Arc<Tools>,
    name_end: Markers,
    tags: Tags,
}

impl CallFormat for Glm {
    const TRIGGERS: &'static [Trigger] = &[Trigger::Marker("<tool_call>")];

    fn new(lexicon: &mut Lexicon<'_>, tools: Arc<Tools>) -> Self {
        let between = ["<arg_key>", "</tool_call>"];
        Self {
            tools,
            name_end: lexicon.markers(between),
            tags: Tags {
                between: lexicon.markers(between),
                openings: 1,
                key_end: lexicon.markers(["</arg_key>"]),
                attributes: Attributes::Opening(lexicon.markers(["<arg_value>"])),
                close: lexicon.markers(["</arg_value>"]),
                followers: lexicon.markers(between),
                framed: false,
            },
        }
    }

    async fn read(&self, cursor: &Cursor, _: usize) -> Result<(), Break> {
        let name = cursor.word_before(&self.name_end).await?;
        tagged_call(cursor, &self.tags, &self.tools, &name).await.map(|_| ())
    }
}
