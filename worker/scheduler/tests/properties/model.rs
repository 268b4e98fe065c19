//! A random model, as far as the scheduler sees it: its planes.

use proptest::{collection::vec, prelude::*};
use tutti_proto::declaration::{ModelDeclaration, Plane, PlaneKind};

use crate::common;

/// The planes of a model. The walks of all models are those of `common::model`.
#[derive(Clone, Debug)]
pub struct Model {
    /// The ratio of each paged plane. Each ratio divides the number of tokens per page.
    pub ratios: Vec<u32>,
    /// Bytes of each slot plane.
    pub slots: Vec<u64>,
}

impl Model {
    pub fn has_slots(&self) -> bool {
        !self.slots.is_empty()
    }

    pub fn declaration(&self, page_tokens: usize) -> ModelDeclaration {
        let page_tokens = page_tokens as u32;
        let paged = |ratio: &u32| PlaneKind::Paged {
            page_tokens,
            ratio: *ratio,
            bytes_per_entry: 64,
            element_type: tutti_proto::cluster::v1::ElementType::Unspecified,
        };
        let slot = |bytes: &u64| PlaneKind::Slot { bytes: *bytes };
        let kinds = self.ratios.iter().map(paged).chain(self.slots.iter().map(slot));
        let plane = |(index, kind)| Plane { name: format!("plane {index}"), kind };
        let walks = common::model().walks().to_vec();
        ModelDeclaration::new(vec!["thinker".into()], walks, kinds.enumerate().map(plane).collect())
            .expect("these planes are consistent")
    }
}

/// Generates a model with one paged plane for each ratio of a non-empty subset of `ratios`, and with up to three slot
/// planes.
pub fn model(ratios: &'static [u32]) -> impl Strategy<Value = Model> {
    let slots =
        prop_oneof![1 => Just(vec![]), 2 => vec(prop_oneof![Just(4_u64), Just(96), 1..5000_u64], 1..4)];
    (proptest::sample::subsequence(ratios, 1..=ratios.len()), slots)
        .prop_map(|(ratios, slots)| Model { ratios, slots })
}
