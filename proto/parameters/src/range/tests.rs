use super::*;

#[test]
fn ends_of_ranges_are_in_and_nan_is_in_none() {
    let closed = Bounded { name: "x", range: Numbers::new(-1.0, 2.0) };
    assert_eq!((closed.check(-1.0), closed.check(2.0)), (Ok(-1.0), Ok(2.0)));
    let above = Bounded { name: "x", range: Numbers::above(0.0, 1.0) };
    assert_eq!((above.check(f32::from_bits(1)), above.check(1.0)), (Ok(f32::from_bits(1)), Ok(1.0)));
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        assert!(closed.check(value).is_err() && above.check(value).is_err(), "{value}");
    }
    let integers = Bounded { name: "x", range: Integers::new(1, 3) };
    assert_eq!((integers.check(1), integers.check(3)), (Ok(1), Ok(3)));
    assert!(Bounded { name: "x", range: Count { most: 2, items: "ids" } }.check(2).is_ok());
}

#[test]
fn a_refusal_names_parameter_value_and_range() {
    let message = |refused: Result<(), Refused>| refused.unwrap_err().to_string();
    let above = Bounded { name: "x", range: Numbers::above(0.0, 1.0) };
    assert_eq!(message(above.check(0.0).map(drop)), "x: is 0, but must be above 0 and at most 1");
    let closed = Bounded { name: "x", range: Numbers::new(-2.0, 2.0) };
    assert_eq!(message(closed.check(2.5).map(drop)), "x: is 2.5, but must be from -2 to 2");
    let integers = Bounded { name: "x", range: Integers::new(-8, 8) };
    assert_eq!(message(integers.check(i32::MIN).map(drop)), "x: is -2147483648, but must be from -8 to 8");
    let count = Bounded { name: "x", range: Count { most: 2, items: "ids" } };
    assert_eq!(message(count.check(3)), "x: has 3 ids, but may have at most 2");
    let ids = "x: token id 9 is out of range: the vocabulary has 9 ids, counted from 0";
    assert_eq!(message(check_token_ids("x", [8, 9], 9)), ids);
}
