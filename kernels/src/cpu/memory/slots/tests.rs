use super::*;

fn state(slots: &Slots, slot: u32) -> Vec<u8> {
    let mut out = vec![7];
    slots.read(SlotId(slot), &mut out).unwrap();
    out.split_off(1)
}

/// Four slots of two planes, of 3 and 100 bytes. Slot `i` holds the byte `i` everywhere.
fn filled() -> Slots {
    let mut slots = Slots::zeroed(&[3, 100], 4).unwrap();
    for slot in 1..4 {
        slots.write(SlotId(slot), &[slot as u8; 103]).unwrap();
    }
    slots
}

fn copy(from: u32, to: u32) -> SlotCopy {
    SlotCopy { from: SlotId(from), to: SlotId(to) }
}

#[test]
fn copies_move_all_planes_and_touch_no_other_slot() {
    let (mut slots, mut pool) = (filled(), ThreadPool::new(2).unwrap());
    slots.copy(&[copy(1, 3)], &mut pool).unwrap();
    assert_eq!([state(&slots, 1), state(&slots, 2), state(&slots, 3)], [[1; 103], [2; 103], [1; 103]]);
    slots.copy(&[copy(0, 1)], &mut pool).unwrap();
    assert_eq!([state(&slots, 1), state(&slots, 2), state(&slots, 3)], [[0; 103], [2; 103], [1; 103]]);
    // The bytes of a slot keep their order across the two planes.
    let bytes: Vec<u8> = (0..103).collect();
    slots.write(SlotId(2), &bytes).unwrap();
    // The copies run in order, to lower and to higher slots. A copy of a slot to itself changes nothing.
    slots.copy(&[copy(2, 1), copy(1, 1), copy(1, 3), copy(0, 2)], &mut pool).unwrap();
    assert_eq!([state(&slots, 1), state(&slots, 2), state(&slots, 3)], [bytes.clone(), vec![0; 103], bytes]);
}

#[test]
fn states_of_several_pieces_are_copied_whole() {
    let bytes = 2 * COPIED_AT_ONCE + 77;
    let (mut slots, mut pool) = (Slots::zeroed(&[bytes], 3).unwrap(), ThreadPool::new(3).unwrap());
    let content: Vec<u8> = (0..bytes).map(|index| (index % 251) as u8 + 1).collect();
    slots.write(SlotId(1), &content).unwrap();
    slots.copy(&[copy(1, 2), copy(0, 1)], &mut pool).unwrap();
    assert!(state(&slots, 2) == content && state(&slots, 1) == vec![0; bytes]);
    slots.copy(&[copy(2, 1)], &mut pool).unwrap();
    assert!(state(&slots, 2) == content && state(&slots, 1) == content);
}

#[test]
fn slots_that_do_not_exist_are_refused() {
    let misuse = |result: Result<(), DeviceError>| assert!(matches!(result, Err(DeviceError::Misuse(_))));
    let mut slots = filled();
    slots.check_copies(&[copy(1, 2), copy(0, 3)]).unwrap();
    for bad in [copy(1, 4), copy(4, 1), copy(1, 0)] {
        misuse(slots.check_copies(&[copy(1, 2), bad]));
    }
    misuse(slots.read(SlotId(4), &mut Vec::new()));
    misuse(slots.read(SlotId::NULL, &mut Vec::new()));
    misuse(slots.write(SlotId::NULL, &[0; 103]));
    misuse(slots.write(SlotId(1), &[0; 102]));
    assert_eq!(state(&slots, 1), [1; 103]);

    let mut none = Slots::zeroed(&[], 4).unwrap();
    misuse(none.check_copies(&[copy(1, 2)]));
    none.check(SlotId(99)).unwrap();
    // A model without slot planes has slots without bytes.
    assert_eq!(state(&none, 2), [0; 0]);
    none.write(SlotId(2), &[]).unwrap();
    assert!(matches!(Slots::zeroed(&[usize::MAX / 2], 8), Err(DeviceError::OutOfMemory { .. })));
}
