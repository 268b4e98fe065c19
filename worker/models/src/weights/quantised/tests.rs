//! Compares the reading of each layout with the values that tests/formats has recorded. `QUANTISED_FORMATS` names the
//! directory that tests/formats/generate made. Without this variable, these tests are skipped with a message.

use std::{env, fs, path::Path};

use ::safetensors::SafeTensors;
use tutti_kernels::{
    Dense, Device, GroupOffsets, Linear, QuantizedRows, WeightType,
    cpu::{CpuDevice, Isa},
};

use super::*;
use crate::{
    LoadFormat, LoadOptions, Quantize,
    weights::{Loader, Role, SafetensorsDir, Source, TensorSpec, Window, convert, safetensors::Stored},
};

fn open(dir: &Path) -> Result<SafetensorsDir, LoadError> {
    let options = LoadOptions {
        kv_cache_dtype: crate::KvCacheDtype::Auto,
        dir: dir.into(),
        load_format: LoadFormat::Auto,
        quantize: Quantize::None,
        max_step_tokens: 1,
        page_tokens: 16,
        expert_parallel: false,
        nodes: None,
        seed: 0,
    };
    match Source::open(dir, &options, WeightType::F32)? {
        Source::Files(files) => Ok(files),
        Source::Gguf(_) | Source::Dummy(_) => unreachable!(),
    }
}

/// Reads a window of a matrix.
fn read(files: &SafetensorsDir, spec: &TensorSpec, window: &Window) -> Vec<u8> {
    let Stored::Quantised(Checked { layout, .. }, dtype) = files.stored(spec).unwrap() else {
        panic!("{} is plain", spec.name);
    };
    let mut device = CpuDevice::new(2, Isa::detect()).unwrap();
    convert::dequantise(&mut device, &*layout, window, dtype).unwrap()
}

fn spec_of(name: &str, shape: &[usize]) -> TensorSpec {
    TensorSpec::matrix(name, Role::Projection, shape[0], shape[1])
}

#[test]
fn every_layout_gives_the_values_of_its_library_to_the_bit() {
    let Some(root) = env::var_os("QUANTISED_FORMATS") else {
        eprintln!("skipped: QUANTISED_FORMATS is not set");
        return;
    };
    let mut layouts = 0;
    for entry in fs::read_dir(Path::new(&root).join("layouts")).unwrap() {
        let dir = entry.unwrap().path();
        let files = open(&dir).unwrap();
        let values = fs::read(dir.join("values.safetensors")).unwrap();
        for (name, expected) in SafeTensors::deserialize(&values).unwrap().iter() {
            let spec = spec_of(name, expected.shape());
            let [rows, columns] = [expected.shape()[0], expected.shape()[1]];
            let size = expected.data().len() / (rows * columns);
            let dims = spec.dims;
            let windows = [
                (0..rows, 0..columns),
                (3..rows - 1, 0..columns),
                (0..rows, columns / 2..columns),
                (1..2, columns / 4..columns / 2 + 1),
            ];
            for (rows, columns) in windows {
                let window = Window { matrix: 0, rows: rows.clone(), columns: columns.clone(), dims };
                let found = read(&files, &spec, &window);
                let cut = |row: usize| {
                    let first = row * dims.columns;
                    &expected.data()[(first + columns.start) * size..(first + columns.end) * size]
                };
                let expected: Vec<u8> = rows.clone().flat_map(cut).copied().collect();
                let at = found.iter().zip(&expected).position(|(one, other)| one != other);
                assert!(
                    found.len() == expected.len() && at.is_none(),
                    "{}: {name} {rows:?} {columns:?} differs at byte {at:?}",
                    dir.display()
                );
            }
        }
        layouts += 1;
    }
    assert!(layouts >= 22, "{layouts} layouts");
}

/// Returns the value of a weight.
fn value(rows: &QuantizedRows<'_>, row: usize, column: usize) -> f32 {
    let code = match rows.element.bits() {
        8 => rows.row(row)[column],
        _ => rows.row(row)[column / 2] >> (column % 2 * 4) & 15,
    };
    let (index, number) = (rows.scale_index(row, column), |code: u8| match rows.element {
        QuantizedType::Int4 => f32::from(code),
        QuantizedType::Int8 => f32::from(code.cast_signed()),
        QuantizedType::E4m3 => e4m3::value(code),
        QuantizedType::E2m1 => E2M1[usize::from(code)],
    });
    let centre = if rows.element == QuantizedType::Int4 { 8.0 } else { 0.0 };
    match rows.offsets {
        GroupOffsets::None => (number(code) - centre) * rows.scales[index],
        GroupOffsets::ZeroPoints(zeros) => (number(code) - number(zeros[index])) * rows.scales[index],
        GroupOffsets::Minima(minima) => number(code) * rows.scales[index] - minima[index],
    }
}

/// Windows of codes and scales, in the form of their layout and in wider ones, stand for the dequantised values.
#[test]
fn windows_are_held_to_the_bit_also_in_wider_forms() {
    let Some(root) = env::var_os("QUANTISED_FORMATS") else {
        eprintln!("skipped: QUANTISED_FORMATS is not set");
        return;
    };
    let mut windows = 0;
    let mut device = CpuDevice::new(2, Isa::detect()).unwrap();
    for entry in fs::read_dir(Path::new(&root).join("layouts")).unwrap() {
        let dir = entry.unwrap().path();
        let files = open(&dir).unwrap();
        let spec = spec_of("model.layers.2.mlp.up_proj.weight", &[136, 320]);
        let Stored::Quantised(Checked { layout, .. }, _) = files.stored(&spec).unwrap() else {
            panic!("{} is plain", spec.name);
        };
        let Some(own) = layout.form() else { continue };
        // Without groups, a window may begin in the middle of a byte.
        let first = if own.group < 320 { own.group } else { 3 };
        let with = |element, offsets| HeldForm { element, offsets, scales: ScaleType::F32, group: 64 };
        let others = [QuantizedType::Int4, QuantizedType::Int8].into_iter().flat_map(|element| {
            [OffsetKind::None, OffsetKind::ZeroPoints, OffsetKind::Minima].map(|kind| with(element, kind))
        });
        for form in [own].into_iter().chain(others.filter_map(|other| own.fused(other))) {
            for (rows, columns) in [(0..136, 0..320), (3..135, 0..320), (5..6, first..320)] {
                let window = Window { matrix: 0, rows, columns, dims: spec.dims };
                let held = HeldRows::read(&mut device, &*layout, &window, form).unwrap();
                let view = held.view();
                view.check().unwrap();
                let mut expected = vec![0; 4 * window.elements()];
                layout
                    .read(window.rows.clone(), window.columns.clone())
                    .dequantise(WeightType::F32, &mut expected);
                for (index, expected) in expected.as_chunks::<4>().0.iter().enumerate() {
                    let (row, column) = (index / window.columns.len(), index % window.columns.len());
                    let (found, expected) = (value(&view, row, column), f32::from_le_bytes(*expected));
                    assert!(
                        found == expected || (found.is_nan() && expected.is_nan()),
                        "{} as {form:?}, {window:?}: {found}, not {expected} at {row} {column}",
                        dir.display()
                    );
                }
                windows += 1;
            }
        }
    }
    assert!(windows > 200, "{windows} windows");
}

#[test]
fn forms_that_hold_no_common_values_are_not_fused() {
    let form = |element, offsets| HeldForm { element, offsets, scales: ScaleType::F16, group: 32 };
    let int4 = form(QuantizedType::Int4, OffsetKind::None);
    let zeros = form(QuantizedType::Int4, OffsetKind::ZeroPoints);
    let minima = form(QuantizedType::Int8, OffsetKind::Minima);
    assert_eq!(int4.fused(zeros), Some(zeros));
    assert_eq!(int4.fused(minima), Some(HeldForm { scales: ScaleType::F32, ..minima }));
    assert_eq!(zeros.fused(minima), None);
    assert_eq!(int4.fused(form(QuantizedType::E2m1, OffsetKind::None)), None);
    assert_eq!(HeldForm { group: 24, ..int4 }.of_columns(96), None);
    assert_eq!(HeldForm { group: 96, ..int4 }.bytes(2, 96), 2 * (48 + 2), "a whole row");
    assert_eq!(HeldForm { group: 96, ..int4 }.bytes(2, 192), 2 * (96 + 6 * 2));
    assert_eq!(HeldForm { group: 128, ..zeros }.bytes(2, 256), 2 * (128 + 2 * 3));
}

/// Products with unit vectors are the weights. Those of a device that holds codes and scales are the dequantised
/// values.
#[test]
fn a_device_holds_the_values_of_each_layout_to_the_bit() {
    let Some(root) = env::var_os("QUANTISED_FORMATS") else {
        eprintln!("skipped: QUANTISED_FORMATS is not set");
        return;
    };
    let mut held = 0;
    for entry in fs::read_dir(Path::new(&root).join("layouts")).unwrap() {
        let dir = entry.unwrap().path();
        for (module, [rows, columns]) in [[8, 32], [40, 96], [136, 320], [264, 128]].into_iter().enumerate() {
            let spec = spec_of(&format!("model.layers.{module}.mlp.up_proj.weight"), &[rows, columns]);
            let files = open(&dir).unwrap();
            let Stored::Quantised(Checked { layout, .. }, _) = files.stored(&spec).unwrap() else {
                panic!("{} is plain", spec.name);
            };
            let name = dir.file_name().unwrap().to_string_lossy();
            let has_no_form = name.contains("_act-") || name.starts_with("nf4");
            assert!(layout.form().is_some() || has_no_form, "{name}");
            let Some(form) = layout.form() else { continue };
            let mut expected = vec![0; 4 * rows * columns];
            layout.read(0..rows, 0..columns).dequantise(WeightType::F32, &mut expected);

            let mut device = CpuDevice::new(2, Isa::detect()).unwrap().with_quantised_activations(false);
            let source = Source::Files(open(&dir).unwrap());
            let specs = [&spec];
            let progress = &mut |_| {};
            let mut loader =
                Loader::new(source, Quantize::None, specs.into_iter(), &mut device, progress).unwrap();
            let matrix = loader.matrix(&[&spec]).unwrap();
            assert!(loader.holds_quantised(), "{name}");
            let bytes = loader.finish();
            let padded = form.bytes(rows.next_multiple_of(16), columns.next_multiple_of(128));
            assert!(
                (form.bytes(rows, columns)..=padded + 4096).contains(&bytes),
                "{name}: {bytes}, {padded}"
            );

            let unit: Vec<f32> =
                (0..columns * columns).map(|i| f32::from(u8::from(i / columns == i % columns))).collect();
            let mut x = device.tensor(columns, columns).unwrap();
            let mut out = device.tensor(columns, rows).unwrap();
            device.upload(&unit, &mut x).unwrap();
            device.linear(Linear::plain(&x, &matrix), &mut out).unwrap();
            let mut found = Vec::new();
            device.download(&out, &mut found).unwrap();
            for (index, value) in expected.as_chunks::<4>().0.iter().enumerate() {
                let (row, column) = (index / columns, index % columns);
                let (value, found) = (f32::from_le_bytes(*value), found[column * rows + row]);
                assert!(value == found || value.is_nan(), "{name} {row} {column}: {found}, not {value}");
            }
            held += 1;
        }
    }
    assert!(held >= 100, "{held} matrices");
}

/// Copies a layout's files with another header: `change` gets each tensor's name and may rename it or change its shape.
fn damaged(dir: &Path, change: impl Fn(&str, &mut serde_json::Value) -> Option<String>) -> tempfile::TempDir {
    let out = tempfile::tempdir().unwrap();
    fs::copy(dir.join("config.json"), out.path().join("config.json")).unwrap();
    let file = fs::read(dir.join("model.safetensors")).unwrap();
    let length = u64::from_le_bytes(*file.first_chunk().unwrap()) as usize;
    let header: serde_json::Map<String, serde_json::Value> =
        serde_json::from_slice(&file[8..8 + length]).unwrap();
    let mut changed = serde_json::Map::new();
    for (name, mut entry) in header {
        let name = change(&name, &mut entry).unwrap_or(name);
        changed.insert(name, entry);
    }
    let header = serde_json::to_vec(&changed).unwrap();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header);
    bytes.extend(&file[8 + length..]);
    fs::write(out.path().join("model.safetensors"), bytes).unwrap();
    out
}

#[test]
fn missing_and_wrong_tensors_are_refused_by_name() {
    let Some(root) = env::var_os("QUANTISED_FORMATS") else {
        eprintln!("skipped: QUANTISED_FORMATS is not set");
        return;
    };
    // The module of tests/formats with 40 outputs and 96 inputs.
    const MODULE: &str = "model.layers.1.mlp.up_proj";
    let spec = spec_of(&format!("{MODULE}.weight"), &[40, 96]);
    let mut refused = 0;
    for entry in fs::read_dir(Path::new(&root).join("layouts")).unwrap() {
        let dir = entry.unwrap().path();
        let file = fs::read(dir.join("model.safetensors")).unwrap();
        let tensors = SafeTensors::deserialize(&file).unwrap();
        let of_module = tensors.names().into_iter().filter(|name| name.starts_with(MODULE));
        for name in of_module.filter(|name| !name.ends_with("input_scale")) {
            // Without its other tensors, a `weight` is plain, and of a type that is refused.
            let renamed =
                |found: &str, _: &mut serde_json::Value| (found == name).then(|| format!("other.{name}"));
            let optional = name.ends_with("g_idx");
            let files = damaged(&dir, renamed);
            let error = open(files.path()).unwrap().check(&spec).err().map(|error| error.to_string());
            assert!(
                error.as_ref().is_some_and(|error| error.contains(MODULE)) || optional,
                "{} without {name}: {error:?}",
                dir.display()
            );
            // Another shape of as many elements.
            let turned = |found: &str, entry: &mut serde_json::Value| {
                if found == name {
                    let shape: Vec<u64> = serde_json::from_value(entry["shape"].clone()).unwrap();
                    entry["shape"] = serde_json::json!([&[1, 1, 1], &shape[..]].concat());
                }
                None
            };
            let files = damaged(&dir, turned);
            let error = open(files.path()).unwrap().check(&spec).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains("shape"), "{}: {error}", dir.display());
            refused += 1;
        }
        let other = spec_of(&spec.name, &[96, 40]);
        let error = open(&dir).unwrap().check(&other).unwrap_err().to_string();
        assert!(error.contains(MODULE), "{}: {error}", dir.display());
    }
    assert!(refused > 50, "{refused} tensors");
}

#[test]
fn a_part_that_divides_a_group_is_refused() {
    let Some(root) = env::var_os("QUANTISED_FORMATS") else {
        eprintln!("skipped: QUANTISED_FORMATS is not set");
        return;
    };
    // Each group of columns of [40, 96], and what two ranks do with it: 48 inputs each.
    for (layout, refused) in [
        ("w4_group-bfloat16", true),
        ("gptq-float32", true),
        ("awq-float32", true),
        ("mxfp4-bfloat16", true),
        ("nvfp4-bfloat16", false),
        ("fp8_blocks-float32", false),
        ("w8a8-bfloat16", false),
        ("w4_act-float32", false),
        ("gptq_act-float32", false),
    ] {
        let files = open(&Path::new(&root).join("layouts").join(layout)).unwrap();
        let spec = spec_of("model.layers.1.mlp.up_proj.weight", &[40, 96]);
        let mut range = spec.shard_range(tutti_kernels::collective::GroupRank::ALONE);
        files.check_range(&spec, &range).unwrap();
        range.columns = 48..96;
        match files.check_range(&spec, &range) {
            Ok(()) => assert!(!refused, "{layout}"),
            Err(error) => {
                let error = error.to_string();
                assert!(
                    refused && error.contains("32 inputs") && error.contains("up_proj"),
                    "{layout}: {error}"
                );
            }
        }
    }
}

#[test]
fn every_float_of_type_e4m3_has_its_value() {
    let finite = (0..=255u8).filter(|bits| bits & 127 != 127);
    let values: Vec<f32> = finite.map(e4m3::value).collect();
    assert_eq!(values.iter().copied().fold(0.0, f32::max), 448.0);
    assert_eq!((e4m3::value(1), e4m3::value(8), e4m3::value(0x38)), (2f32.powi(-9), 2f32.powi(-6), 1.0));
    assert!(e4m3::value(127).is_nan() && e4m3::value(255).is_nan());
    assert_eq!(e4m3::value(0x80).to_bits(), (-0f32).to_bits());
    assert!(values[..127].is_sorted());
}
