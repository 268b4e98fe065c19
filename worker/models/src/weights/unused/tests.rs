use super::describe;

const USED: [&str; 3] =
    ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.layers.1.o.weight"];

#[test]
fn unused_tensors_are_counted_and_named() {
    let said = |unused: &[&str]| describe(unused, USED.into_iter());
    assert_eq!(said(&[]), None);
    assert_eq!(
        said(&["mtp.fc.weight", "model.visual.a", "model.layers.0.self_attn.rotary_emb.inv_freq"]),
        None
    );
    let bias = said(&["model.layers.0.self_attn.q_proj.bias"]).unwrap();
    assert_eq!(
        bias,
        "the checkpoint has 1 tensors that the model does not use: model.layers.0.self_attn.q_proj.bias"
    );
    let names: Vec<String> = (0..11).map(|i| format!("extra.{i}")).collect();
    let many = said(&names.iter().map(String::as_str).collect::<Vec<_>>()).unwrap();
    assert!(many.contains("has 11 tensors") && many.contains("extra.7 and 3 more"), "{many}");
}

#[test]
fn a_config_with_fewer_layers_than_the_files_is_said() {
    let said = describe(&["model.layers.5.o.weight", "x.layers.9"], USED.into_iter()).unwrap();
    assert!(said.contains("the files have 10 layers, but config.json asks for 2"), "{said}");
}
