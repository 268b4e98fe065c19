use super::*;

#[test]
fn a_parameter_is_declared_once_per_place() {
    for (i, parameter) in all().enumerate() {
        for other in all().take(i) {
            let shared = other.scopes.iter().any(|scope| parameter.scopes.contains(scope));
            assert!(!(other.name == parameter.name && shared), "{} is declared twice", parameter.name);
            let field = other.grpc.iter().find(|field| parameter.grpc.contains(field));
            assert_eq!(field, None, "{} and {}", other.name, parameter.name);
        }
        assert!(!parameter.scopes.is_empty() || !parameter.grpc.is_empty(), "{}", parameter.name);
    }
}

#[test]
fn the_fields_of_numbers_have_their_names() {
    for number in &NUMBERS {
        let declared = all().find(|parameter| parameter.name == number.bounds.name).unwrap();
        assert_eq!(declared.grpc, [format!("sampling.{}", number.bounds.name)]);
        assert_eq!(declared.kind, Kind::Number(number.bounds.range));
    }
}

#[test]
fn a_default_is_in_its_range() {
    for parameter in all() {
        let Absent::Number(value) = parameter.absent else { continue };
        let is_in = match parameter.kind {
            Kind::Number(range) => range.contains(value),
            Kind::Integer(range) => (range.low..=range.high).contains(&(value as i64)),
            _ => false,
        };
        assert!(is_in, "{}", parameter.name);
    }
}
