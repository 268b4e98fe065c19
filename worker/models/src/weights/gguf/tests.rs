use std::{env, fs};

use ::safetensors::SafeTensors;
use tutti_kernels::{
    Dense, Linear, Quantize,
    cpu::{CpuDevice, Isa, Weights},
};

use super::names::{Location, Rows, locate};
use super::*;
use crate::weights::{Loader, Role, Source};

#[test]
fn every_type_gives_the_values_of_the_package_gguf_to_the_bit() {
    let Some(root) = env::var_os("QUANTISED_FORMATS") else {
        eprintln!("skipped: QUANTISED_FORMATS is not set");
        return;
    };
    let dir = Path::new(&root).join("gguf");
    let file = GgufFile::open(&dir.join("model.gguf")).unwrap();
    let values = fs::read(dir.join("values.safetensors")).unwrap();
    let values = SafeTensors::deserialize(&values).unwrap();
    let mut device = CpuDevice::new(2, Isa::detect()).unwrap();
    for (name, expected) in values.iter() {
        let [rows, columns] = [expected.shape()[0], expected.shape()[1]];
        let spec = TensorSpec::matrix(name, Role::Projection, rows, columns);
        assert_eq!(file.check(&spec).unwrap(), WeightType::F32);
        for (rows, columns) in [
            (0..rows, 0..columns),
            (3..rows - 1, 0..columns),
            (1..2, columns / 3..columns),
            (0..rows, columns / 4..columns / 2 + 1),
        ] {
            let window = Window { matrix: 0, rows: rows.clone(), columns: columns.clone(), dims: spec.dims };
            let found = file.read(&mut device, &spec, &window, WeightType::F32).unwrap();
            let cut = |row: usize| {
                let first = row * spec.dims.columns;
                &expected.data()[(first + columns.start) * 4..(first + columns.end) * 4]
            };
            let expected: Vec<u8> = rows.clone().flat_map(cut).copied().collect();
            assert!(found == expected, "{name} {rows:?} {columns:?}");
        }
    }
    assert_eq!(values.len(), 10);
}

/// Returns the weights of a matrix, as products with the unit vectors.
fn weights(device: &mut CpuDevice, matrix: &Weights) -> Vec<f32> {
    let [rows, columns] = device.matrix_shape(matrix);
    let unit: Vec<f32> =
        (0..columns * columns).map(|i| f32::from(u8::from(i / columns == i % columns))).collect();
    let (mut x, mut out) = (device.tensor(columns, columns).unwrap(), device.tensor(columns, rows).unwrap());
    device.upload(&unit, &mut x).unwrap();
    device.linear(Linear::plain(&x, matrix), &mut out).unwrap();
    let mut found = Vec::new();
    device.download(&out, &mut found).unwrap();
    (0..rows * columns).map(|i| found[i % columns * rows + i / columns]).collect()
}

#[test]
fn a_device_holds_the_values_of_each_type_to_the_bit() {
    let Some(root) = env::var_os("QUANTISED_FORMATS") else {
        eprintln!("skipped: QUANTISED_FORMATS is not set");
        return;
    };
    let dir = Path::new(&root).join("gguf");
    let values = fs::read(dir.join("values.safetensors")).unwrap();
    let values = SafeTensors::deserialize(&values).unwrap();
    let spec_of = |name: &str| {
        let shape = values.tensor(name).unwrap().shape().to_vec();
        TensorSpec::matrix(name, Role::Projection, shape[0], shape[1])
    };
    let floats = |spec: &TensorSpec| -> Vec<f32> {
        let tensor = values.tensor(&spec.name).unwrap();
        tensor.data().as_chunks::<4>().0.iter().map(|x| f32::from_le_bytes(*x)).collect()
    };
    let specs: Vec<_> = values.names().into_iter().map(spec_of).collect();
    let mut device = CpuDevice::new(2, Isa::detect()).unwrap().with_quantised_activations(false);
    let source = Source::Gguf(GgufFile::open(&dir.join("model.gguf")).unwrap());
    let progress = &mut |_| {};
    let mut loader = Loader::new(source, Quantize::None, specs.iter(), &mut device, progress).unwrap();
    let quantised = GgufFile::open(&dir.join("model.gguf")).unwrap();
    let mut sizes = Vec::new();
    for spec in &specs {
        let before = loader.held();
        let matrix = loader.matrix(&[spec]).unwrap();
        let bits = 8.0 * (loader.held() - before) as f64
            / (spec.dims.rows.next_multiple_of(16) * spec.dims.columns) as f64;
        if let Some(blocks) = quantised.blocks(spec).unwrap() {
            sizes.push((format!("{:?}", blocks.dtype), bits.round()));
        }
        assert!(weights(loader.device(), &matrix) == floats(spec), "{}", spec.name);
    }
    // Matrices of several types are fused in a form that holds all of them.
    for columns in [96, 768] {
        let of_width =
            |spec: &&TensorSpec| spec.dims.columns == columns && quantised.blocks(spec).unwrap().is_some();
        let fused: Vec<&TensorSpec> = specs.iter().filter(of_width).collect();
        assert!(fused.len() > 2, "{} types", fused.len());
        let matrix = loader.matrix(&fused).unwrap();
        let found = weights(loader.device(), &matrix);
        let expected: Vec<f32> = fused.iter().flat_map(|spec| floats(spec)).collect();
        assert!(found == expected, "types with {columns} columns");
    }
    sizes.sort_by(|one, other| one.0.cmp(&other.0));
    let sizes: Vec<_> = sizes.iter().map(|(dtype, bits)| (&**dtype, *bits)).collect();
    let expected = [
        ("Q4K", 6.0),
        ("Q4_0", 5.0),
        ("Q4_1", 5.0),
        ("Q5K", 10.0),
        ("Q5_0", 9.0),
        ("Q6K", 10.0),
        ("Q8_0", 9.0),
    ];
    assert_eq!(sizes, expected, "bits per weight");
}

#[test]
fn tensors_have_their_names_in_a_gguf_file() {
    let plain = |name: &str| Some(Location { name: name.into(), expert: None, rows: Rows::Plain });
    assert_eq!(locate("model.layers.7.mlp.down_proj.weight"), plain("blk.7.ffn_down.weight"));
    assert_eq!(locate("model.layers.7.mlp.gate.weight"), plain("blk.7.ffn_gate_inp.weight"));
    assert_eq!(locate("lm_head.weight"), plain("output.weight"));
    let keys = Some(Location { name: "blk.0.attn_k.bias".into(), expert: None, rows: Rows::Keys });
    assert_eq!(locate("model.layers.0.self_attn.k_proj.bias"), keys);
    let expert = Location { name: "blk.1.ffn_up_exps.weight".into(), expert: Some(5), rows: Rows::Plain };
    assert_eq!(locate("model.layers.1.mlp.experts.5.up_proj.weight"), Some(expert));
    assert_eq!(locate("model.layers.1.linear_attn.out_proj.weight"), None);
}
