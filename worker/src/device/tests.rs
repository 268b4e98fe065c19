use std::path::PathBuf;

use tutti_settings::{
    ConnectionSettings, DeviceSettings, EngineSettings, SimSettings, TensorParallelSettings, TraceSettings,
    WeightSettings,
};

use super::*;

/// Settings without a checkpoint.
pub(crate) fn settings(device: DeviceChoice) -> WorkerSettings {
    WorkerSettings {
        model_dir: PathBuf::new(),
        nodes: None,
        max_waiting_requests: 1,
        weights: WeightSettings::default(),
        device: DeviceSettings { device, ..DeviceSettings::default() },
        connections: ConnectionSettings::default(),
        tensor_parallel: TensorParallelSettings::default(),
        engine: EngineSettings::default(),
        memory_share: None,
        hang_timeout: 120,
        trace: TraceSettings::default(),
        sim: SimSettings::default(),
    }
}

fn nothing() -> Result<usize, Missing> {
    let searched = "LD_LIBRARY_PATH (/opt/cuda)".to_owned();
    Err(Missing::Library { library: "libcuda.so.1", purpose: "it comes with the driver", searched })
}

#[test]
fn auto_takes_a_gpu_where_there_is_one() {
    let choose = |rank, gpus: fn() -> Result<usize, Missing>| {
        choose_among(&settings(DeviceChoice::Auto), Rank(rank), gpus).unwrap()
    };
    assert_eq!(choose(0, nothing), Chosen::Cpu);
    assert_eq!(choose(1, || Ok(4)), Chosen::Cuda { ordinal: 1 });
    assert_eq!(choose(5, || Ok(4)), Chosen::Cuda { ordinal: 1 }, "more workers than GPUs share them");
    assert_eq!(choose(0, || Err(Missing::Gpu("none".into()))), Chosen::Cpu);
}

#[test]
fn cuda_without_a_driver_names_the_library_and_where_it_was_looked_for() {
    let error = choose_among(&settings(DeviceChoice::Cuda), Rank(0), nothing).unwrap_err();
    assert_eq!(error.field(), Some("device"));
    let text = error.to_string();
    assert!(text.contains("libcuda.so.1") && text.contains("/opt/cuda"), "{text}");
}

#[test]
fn a_folder_of_compiled_kernels_that_is_not_there_is_refused_by_name() {
    let mut settings = settings(DeviceChoice::Auto);
    settings.device.compiled_kernels = Some(PathBuf::from("/no/such/folder"));
    let error = choose(&settings, Rank(0)).unwrap_err();
    assert_eq!(error.field(), Some("compiled_kernels"));
    assert!(error.to_string().contains("/no/such/folder"), "{error}");
}

#[test]
fn a_group_needs_the_library_of_collectives() {
    let nccl = || {
        let (library, purpose) = ("libnccl.so.2", "it comes with NCCL");
        Err(Missing::Library { library, purpose, searched: "/nowhere".to_owned() })
    };
    let mut settings = settings(DeviceChoice::Cuda);
    settings.tensor_parallel.tp = 2;
    let text = choose_among(&settings, Rank(1), nccl).unwrap_err().to_string();
    assert!(text.contains("libnccl.so.2") && text.contains("/nowhere"), "{text}");
    assert_eq!(choose_among(&settings, Rank(3), || Ok(2)).unwrap(), Chosen::Cuda { ordinal: 1 });
    settings.device.device = DeviceChoice::Auto;
    assert_eq!(choose_among(&settings, Rank(1), nccl).unwrap(), Chosen::Cpu);
    settings.device.device = DeviceChoice::Cpu;
    assert_eq!(group_id(&settings, Rank(0)).unwrap(), None, "CPUs meet without an id");
}
