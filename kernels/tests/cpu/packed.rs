//! Tests that weights which are mapped from a cache file equal the packed weights.

use std::{fs, os::unix::fs::FileExt, path::Path};

use tutti_kernels::{
    Argmax, Dense, Device, Embed, HostMatrix, Linear, PageId, Quantize, Sampler, WeightType,
    cpu::{CpuDevice, Isa, PackedOutcome, PackedWeights, ScreenCounts},
};

use crate::support::{Random, Share, begin, bits, bytes, results, tensor, testable};

/// A matrix of a checkpoint.
struct Matrix {
    bytes: Vec<u8>,
    dtype: WeightType,
    rows: usize,
    columns: usize,
}

impl Matrix {
    fn new(dtype: WeightType, rows: usize, columns: usize, seed: u64) -> Self {
        let bytes = bytes(dtype, &Random::new(seed).normals(rows * columns, 0.5));
        Self { bytes, dtype, rows, columns }
    }

    fn view(&self) -> HostMatrix<'_> {
        let Self { bytes, dtype, rows, columns } = self;
        HostMatrix::new(bytes, *dtype, *rows, *columns)
    }
}

/// Returns the bits of a device's matrix products, and the outcome of loading the cache file in `dir`.
fn products(
    dir: Option<&Path>,
    matrices: &[Matrix],
    quantize: Quantize,
) -> (Vec<u32>, Option<PackedOutcome>) {
    let mut device = CpuDevice::new(2, Isa::detect()).unwrap();
    let packed = dir.map(|dir| PackedWeights::open(dir, "a checkpoint"));
    if let Some(packed) = &packed {
        device = device.with_packed_weights(packed.clone());
    }
    let mut rows = Vec::new();
    let weights: Vec<_> =
        matrices.iter().map(|matrix| device.matrix(&[matrix.view()], quantize).unwrap()).collect();
    let outcome = packed.map(|packed| packed.finish());
    for (weights, matrix) in weights.iter().zip(matrices) {
        let x = Random::new(9).normals(3 * matrix.columns, 1.0);
        let x = tensor(&mut device, matrix.columns, &x);
        let mut out = device.tensor(x.live(), matrix.rows).unwrap();
        device.linear(Linear::plain(&x, weights), &mut out).unwrap();
        rows.extend(bits(out.values()));
    }
    (rows, outcome)
}

fn matrices() -> Vec<Matrix> {
    let shapes = [(WeightType::Bf16, 70, 256), (WeightType::F32, 16, 130), (WeightType::F16, 33, 7)];
    shapes
        .into_iter()
        .zip(1..)
        .map(|((dtype, rows, columns), seed)| Matrix::new(dtype, rows, columns, seed))
        .collect()
}

fn only_file(dir: &Path) -> std::path::PathBuf {
    let files: Vec<_> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(files.len(), 1, "{files:?}");
    files[0].clone()
}

#[test]
fn a_later_start_maps_the_bits_that_were_packed() {
    for quantize in [Quantize::None, Quantize::Int8, Quantize::Int4] {
        let dir = tempfile::tempdir().unwrap();
        let (plain, _) = products(None, &matrices(), quantize);
        let (first, written) = products(Some(dir.path()), &matrices(), quantize);
        let (second, mapped) = products(Some(dir.path()), &matrices(), quantize);
        assert_eq!((written, mapped), (Some(PackedOutcome::Written), Some(PackedOutcome::Mapped)));
        assert!(plain == first && plain == second, "{quantize:?}");
    }
}

#[test]
fn a_file_of_other_weights_is_left_and_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let old = matrices();
    products(Some(dir.path()), &old, Quantize::None);
    let mut new = matrices();
    new[1] = Matrix::new(WeightType::F32, 16, 130, 99);
    let (plain, _) = products(None, &new, Quantize::None);
    for outcome in ["Unused", "Written", "Mapped"] {
        let (got, found) = products(Some(dir.path()), &new, Quantize::None);
        assert!(format!("{:?}", found.unwrap()).starts_with(outcome));
        assert!(got == plain, "{outcome}");
    }
}

#[test]
fn a_file_that_is_not_whole_is_written_anew() {
    let dir = tempfile::tempdir().unwrap();
    let (plain, _) = products(Some(dir.path()), &matrices(), Quantize::None);
    let path = only_file(dir.path());
    let whole = fs::metadata(&path).unwrap().len();
    let spoil: [&dyn Fn(&fs::File); 3] =
        [&|file| file.set_len(whole - 4096).unwrap(), &|file| file.set_len(0).unwrap(), &|file| {
            file.write_all_at(b"another", 0).unwrap()
        }];
    for spoil in spoil {
        spoil(&fs::File::options().write(true).open(&path).unwrap());
        let (got, outcome) = products(Some(dir.path()), &matrices(), Quantize::None);
        assert_eq!(outcome, Some(PackedOutcome::Written));
        assert!(got == plain);
        assert_eq!(fs::metadata(only_file(dir.path())).unwrap().len(), whole);
    }
}

#[test]
fn one_process_writes_and_the_others_pack_for_themselves() {
    let dir = tempfile::tempdir().unwrap();
    let writer = PackedWeights::open(dir.path(), "a checkpoint");
    let (plain, _) = products(None, &matrices(), Quantize::None);
    let (got, outcome) = products(Some(dir.path()), &matrices(), Quantize::None);
    let Some(PackedOutcome::Unused(why)) = outcome else { panic!("{outcome:?}") };
    assert!(why.contains("another process"), "{why}");
    assert!(got == plain);
    // A writer that ends early leaves no file that counts as complete.
    drop(writer);
    assert_eq!(products(Some(dir.path()), &matrices(), Quantize::None).1, Some(PackedOutcome::Written));
}

#[test]
fn where_nothing_can_be_written_weights_are_packed() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("missing");
    let (plain, _) = products(None, &matrices(), Quantize::None);
    let (got, outcome) = products(Some(&missing), &matrices(), Quantize::None);
    assert!(matches!(outcome, Some(PackedOutcome::Unused(_))), "{outcome:?}");
    assert!(got == plain);
}

#[test]
fn a_link_in_the_way_of_the_file_is_not_followed() {
    let (dir, victim) = (tempfile::tempdir().unwrap(), tempfile::NamedTempFile::new().unwrap());
    let (plain, _) = products(Some(dir.path()), &matrices(), Quantize::None);
    let file = only_file(dir.path());
    let partial = file.with_extension("partial");
    // A link replaces the file that is written, and then the file that is read. Both links lead to another file of this
    // user.
    for link in [&partial, &file] {
        fs::write(victim.path(), "a year of work").unwrap();
        let _ = (fs::remove_file(&file), fs::remove_file(&partial));
        std::os::unix::fs::symlink(victim.path(), link).unwrap();
        let (found, outcome) = products(Some(dir.path()), &matrices(), Quantize::None);
        assert!(found == plain);
        let written = outcome == Some(PackedOutcome::Written);
        assert_eq!(written, link == &file, "{link:?}: {outcome:?}");
        assert_eq!(fs::read_to_string(victim.path()).unwrap(), "a year of work");
    }
    assert!(!file.is_symlink(), "the link to another file was not replaced");
}

#[test]
fn a_fifo_in_the_way_of_the_file_holds_up_nothing() {
    let dir = tempfile::tempdir().unwrap();
    products(Some(dir.path()), &matrices(), Quantize::None);
    let file = only_file(dir.path());
    fs::remove_file(&file).unwrap();
    rustix::fs::mknodat(rustix::fs::CWD, &file, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0)
        .unwrap();
    let (done, ended) = std::sync::mpsc::channel();
    let path = dir.path().to_owned();
    std::thread::spawn(move || done.send(products(Some(&path), &matrices(), Quantize::None).1));
    ended.recv_timeout(std::time::Duration::from_secs(60)).expect("the load waits for the FIFO");
}

/// Loads two LM heads with a matrix between them, with or without screens. Token 5 must be the likeliest with both
/// heads. Returns the use of screens, and the outcome of loading the file.
fn heads(dir: &Path, screened: bool, weights: [f32; 2]) -> (ScreenCounts, PackedOutcome) {
    const INPUTS: usize = 128;
    let packed = PackedWeights::open(dir, "a checkpoint");
    let device = CpuDevice::new(2, Isa::detect()).unwrap();
    let mut device = device.with_packed_weights(packed.clone()).with_screened_head(screened);
    let x = Random::new(5).normals(INPUTS, 1.0);
    let mut load = |weight: f32, is_head: bool| {
        let mut values = Random::new(6).normals(1003 * INPUTS, 0.1);
        values[5 * INPUTS..][..INPUTS].copy_from_slice(&x);
        values[20 * INPUTS] = weight;
        let bytes = bytes(WeightType::Bf16, &values);
        let source = [HostMatrix::new(&bytes, WeightType::Bf16, 1003, INPUTS)];
        match is_head {
            true => device.head_matrix(&source, Quantize::None).unwrap(),
            false => device.matrix(&source, Quantize::None).unwrap(),
        }
    };
    let first = load(weights[0], true);
    let between = load(0.5, false);
    let second = load(weights[1], true);
    let outcome = packed.finish();
    let x = tensor(&mut device, INPUTS, &x);
    let mut logits = device.tensor(1, 1003).unwrap();
    for weight in [&first, &between, &second] {
        device.argmax(Argmax { x: &x, norm: None, weight, logits: &mut logits, allowed: &[] }).unwrap();
    }
    let tokens: Vec<_> = results(&mut device).sampled.into_iter().map(|row| row.unwrap().token).collect();
    assert_eq!(tokens, [5; 3], "{outcome:?}");
    (device.screen_counts(), outcome)
}

/// Loads a table, a matrix, and a tied table (which is also the LM head). Returns look-ups from both tables, and the
/// outcome of loading the file.
fn look_ups(dir: &Path, isa: Isa) -> (Vec<u32>, PackedOutcome) {
    const INPUTS: usize = 200;
    let packed = PackedWeights::open(dir, &format!("a checkpoint on {isa}"));
    let mut device = CpuDevice::new(2, isa).unwrap().with_packed_weights(packed.clone());
    let source = Matrix::new(WeightType::Bf16, 37, INPUTS, 6);
    let table = device.table_matrix(&[source.view()], Quantize::None).unwrap();
    device.matrix(&[source.view()], Quantize::None).unwrap();
    let tied = device.tied_matrix(&[source.view()], Quantize::None).unwrap();
    let outcome = packed.finish();
    let ids: Vec<u32> = (0..37).collect();
    begin(&mut device, &[Share { tokens: 37, pages: vec![PageId(1); 3], ..Share::default() }], &ids, &[]);
    let mut out = device.tensor(37, INPUTS).unwrap();
    let mut found = Vec::new();
    for table in [&table, &tied] {
        device.embed(Embed { table, shard: None }, &mut out).unwrap();
        found.extend(bits(out.values()));
    }
    (found, outcome)
}

#[test]
fn tables_are_mapped_with_the_bits_of_the_checkpoint_on_every_path() {
    let source = Matrix::new(WeightType::Bf16, 37, 200, 6).bytes;
    let row = source.as_chunks::<2>().0.iter().map(|bytes| u32::from(u16::from_le_bytes(*bytes)) << 16);
    let want: Vec<u32> = row.clone().chain(row).collect();
    for isa in testable("mapped tables") {
        let dir = tempfile::tempdir().unwrap();
        for outcome in [PackedOutcome::Written, PackedOutcome::Mapped] {
            let (found, how) = look_ups(dir.path(), isa);
            assert_eq!(how, outcome, "{isa}");
            assert!(found == want, "{isa} {outcome:?}");
        }
    }
}

#[test]
fn a_screen_is_mapped_with_its_head() {
    let dir = tempfile::tempdir().unwrap();
    let (written, first) = heads(dir.path(), true, [0.5; 2]);
    let (mapped, second) = heads(dir.path(), true, [0.5; 2]);
    assert_eq!((first, second), (PackedOutcome::Written, PackedOutcome::Mapped));
    assert!(written.screened == 2 && written == mapped, "{written:?} {mapped:?}");
}

/// The first head has no screen, because one of its weights is not finite. The logit of that weight's token is not the
/// largest.
#[test]
fn a_head_without_a_screen_is_mapped_as_such() {
    let dir = tempfile::tempdir().unwrap();
    let negative = -Random::new(5).normals(1, 1.0)[0].signum();
    for outcome in [PackedOutcome::Written, PackedOutcome::Mapped] {
        let (counts, found) = heads(dir.path(), true, [negative * f32::INFINITY, 0.5]);
        assert_eq!((counts.screened, found), (1, outcome));
    }
}

#[test]
fn a_file_without_screens_is_not_taken_for_one_with_them() {
    for screened in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(heads(dir.path(), !screened, [0.5; 2]).1, PackedOutcome::Written);
        let (counts, unused) = heads(dir.path(), screened, [0.5; 2]);
        assert!(matches!(unused, PackedOutcome::Unused(_)), "{unused:?}");
        assert_eq!(counts.screened, if screened { 2 } else { 0 });
        assert_eq!(heads(dir.path(), screened, [0.5; 2]).1, PackedOutcome::Written);
        assert_eq!(heads(dir.path(), screened, [0.5; 2]), (counts, PackedOutcome::Mapped));
    }
}
