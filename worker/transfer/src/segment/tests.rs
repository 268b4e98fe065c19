use super::*;

const SECRET: [u8; 16] = [7; 16];

#[test]
fn one_side_reads_what_the_other_writes() {
    let here = Segment::create(&SECRET, 100).unwrap();
    let there = Segment::open(&here.path(), &SECRET).unwrap();
    there.write(60, &[1; 40]).unwrap();
    assert_eq!(here.read(60, 40).unwrap(), [1; 40]);
    assert!(there.holds(60, 40) && !there.holds(60, 41) && !there.holds(u64::MAX, 2));
    assert!(there.write(61, &[1; 40]).is_err(), "it does not grow");
    assert!(there.file.set_len(10).is_err(), "nor shrink");
}

#[test]
fn a_segment_opens_only_with_its_secret() {
    // The secret differs from the other tests' secret, because their segments may reuse the descriptor of the closed
    // file.
    let secret = [9; 16];
    let here = Segment::create(&secret, 100).unwrap();
    assert!(Segment::open(&here.path(), &[8; 16]).is_err());
    let path = here.path();
    drop(here);
    assert!(Segment::open(&path, &secret).is_err(), "it is gone with its holders");
    assert!(Segment::open("/proc/self/fd/0/none", &secret).is_err());
}
