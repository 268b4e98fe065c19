use std::{env, fs};

use ::safetensors::SafeTensors;
use tutti_kernels::cpu::{CpuDevice, Isa};

use super::names::{Location, Rows, locate};
use super::*;
use crate::weights::Role;

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
