use super::{SOURCES, kernel, names};

#[test]
fn every_kernel_that_is_named_is_in_its_source() {
    for source in SOURCES {
        let text = source.text();
        let defined = text.matches("KERNEL(").count() - text.matches("#define KERNEL(").count();
        assert!(
            defined > 0 && source.kernels.iter().all(|kernel| text.contains(kernel.name)),
            "{}",
            source.name
        );
    }
}

#[test]
fn a_kernel_has_the_index_of_its_name() {
    let names: Vec<_> = names().collect();
    let (first, last) = (kernel::rms_norm_f32, kernel::from_keys);
    assert_eq!([names[first.index], names[last.index]], [first.name, last.name]);
    assert_eq!(names.len(), last.index + 1);
}
