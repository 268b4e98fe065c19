use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;

proptest! {
    #[test]
    fn it_is_a_queue_whose_members_can_go_to_its_end(
        steps in prop::collection::vec((0u32..8, any::<bool>()), 0..80),
    ) {
        let (mut order, mut model) = (Recency::default(), VecDeque::new());
        for (slot, remove) in steps {
            let found = model.iter().position(|s| *s == slot);
            match (found, remove) {
                (None, true) => {}
                (None, false) => order.push(slot),
                (Some(_), true) => order.remove(slot),
                (Some(_), false) => order.touch(slot),
            }
            model.retain(|s| *s != slot);
            if !remove {
                model.push_back(slot);
            }
            prop_assert_eq!(order.oldest(), model.front().copied());
        }
        while let Some(slot) = model.pop_front() {
            prop_assert_eq!(order.oldest(), Some(slot));
            order.remove(slot);
        }
        prop_assert_eq!(order.oldest(), None);
    }
}
