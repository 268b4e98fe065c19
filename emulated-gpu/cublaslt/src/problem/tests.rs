use super::*;

fn layout(kind: i32, rows: u64, columns: u64) -> Layout {
    Layout { kind, order: 0, rows, columns, leading: rows as i64, batch: 1, stride: 0 }
}

/// Returns the problem of D (3 by 4) = A (5 by 3, transposed) B (5 by 4) in bf16, after `change`.
fn problem(change: impl FnOnce(&mut Description, &mut [Layout; 4])) -> Result<Problem, Status> {
    let mut description = Description::new(68, 0);
    description.operations[0] = 1;
    let mut layouts = [layout(14, 5, 3), layout(14, 5, 4), layout(14, 3, 4), layout(14, 3, 4)];
    change(&mut description, &mut layouts);
    Problem::new(&description, layouts.each_ref())
}

#[test]
fn what_is_used_is_accepted() {
    assert!(problem(|_, _| ()).is_ok());
    assert!(problem(|_, l| (l[2].kind, l[3].kind) = (0, 0)).is_ok(), "f32 results of bf16 operands");
    assert!(problem(|d, _| (d.epilogue, d.bias) = (4, 0x1000)).is_ok());
}

#[test]
fn what_has_no_kernel_is_not_supported() {
    type Change = fn(&mut Description, &mut [Layout; 4]);
    let changes: [Change; 9] = [
        |d, _| d.compute = 64,
        |d, _| d.compute = 77,
        |d, _| d.scale = 1,
        |d, _| d.pointer_mode = 1,
        |d, _| d.operations[2] = 1,
        |d, _| d.epilogue = 2,
        |_, l| l[0].kind = 2,
        |_, l| l[3].kind = 0,
        |_, l| l[1].order = 2,
    ];
    for (index, change) in changes.into_iter().enumerate() {
        assert_eq!(problem(change), Err(Status::NOT_SUPPORTED), "change {index}");
    }
}

#[test]
fn sizes_that_do_not_fit_are_invalid() {
    type Change = fn(&mut Description, &mut [Layout; 4]);
    let changes: [Change; 7] = [
        |d, _| d.operations[0] = 0,
        |_, l| l[0].leading = 4,
        |_, l| l[1].columns = 5,
        |_, l| l[3].rows = 2,
        |_, l| l[0].batch = 2,
        |_, l| l[2].rows = 0,
        |d, _| d.epilogue = 4,
    ];
    for (index, change) in changes.into_iter().enumerate() {
        assert_eq!(problem(change), Err(Status::INVALID_VALUE), "change {index}");
    }
}

#[test]
fn an_algorithm_serves_what_it_was_asked_for() {
    let asked = problem(|_, _| ()).unwrap();
    let mut preference = Preference::new();
    let algorithm = Algorithm::new(&asked, &preference, Variant::Plain);
    assert_eq!(algorithm.workspace_bytes, 0);
    assert_eq!(algorithm.check(&asked, [256; 4], (0, 0)), Ok(()));
    assert_eq!(
        algorithm.check(&asked, [256, 264, 256, 256], (0, 0)),
        Err(Status::NOT_SUPPORTED),
        "alignment"
    );
    let more_rows = problem(|_, l| (l[1].columns, l[2].columns, l[3].columns) = (9, 9, 9)).unwrap();
    assert_eq!(algorithm.check(&more_rows, [256; 4], (0, 0)), Ok(()));
    let other = problem(|_, l| (l[2].kind, l[3].kind) = (0, 0)).unwrap();
    assert_eq!(algorithm.check(&other, [256; 4], (0, 0)), Err(Status::NOT_SUPPORTED), "types");

    preference.workspace_bytes = 1 << 20;
    let algorithm = Algorithm::new(&asked, &preference, Variant::Plain);
    assert!(algorithm.workspace_bytes > 0);
    assert_eq!(algorithm.check(&asked, [256; 4], (0, 0)), Err(Status::INVALID_VALUE), "workspace");
    assert_eq!(algorithm.check(&asked, [256; 4], (512, 1 << 20)), Ok(()));
}

#[test]
fn a_wide_algorithm_refuses_few_columns() {
    let few = problem(|_, _| ()).unwrap();
    let columns = WIDE as u64;
    let many =
        problem(|_, l| (l[1].columns, l[2].columns, l[3].columns) = (columns, columns, columns)).unwrap();
    let [plain, wide, reverse] =
        Variant::ALL.map(|variant| Algorithm::new(&few, &Preference::new(), variant));
    assert_eq!(wide.supports(&few), Err(Status::NOT_SUPPORTED));
    assert_eq!(wide.supports(&many), Ok(()));
    assert_eq!([plain.supports(&few), reverse.supports(&few)], [Ok(()), Ok(())]);
    assert_eq!([plain, wide, reverse].map(|algorithm| algorithm.variant()), Variant::ALL.map(Some));
}
