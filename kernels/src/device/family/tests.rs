use crate::cpu::{CpuDevice, Isa};
use crate::{Device, DeviceError, Observer, Operation, Recorder};

family! {
    /// A family with two operations, of which the CPU device implements one.
    pub trait Halves {
        /// Does nothing.
        fn first(&mut self, x: &Self::Tensor, count: &mut usize) => |recorder| recorder.by_row(x);
        /// Exists on no device.
        fn second(&mut self, x: &mut Self::Tensor) => |recorder| recorder.by_row(x);
    }
}

impl Halves for CpuDevice {
    const IMPLEMENTED: bool = true;

    fn first(&mut self, _: &Self::Tensor, count: &mut usize) -> Result<(), DeviceError> {
        *count += 1;
        Ok(())
    }
}

/// An observer that keeps the names and rows of operations.
#[derive(Default)]
struct Names(Vec<(&'static str, usize)>);

impl Observer for Names {
    fn observe<T>(
        &mut self,
        operation: &Operation,
        run: impl FnOnce() -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        self.0.push((operation.name, operation.rows));
        run()
    }
}

#[test]
fn an_operation_that_a_device_lacks_is_unsupported_and_named() {
    let mut device = CpuDevice::new(1, Isa::detect()).unwrap();
    let (mut x, mut count) = (device.tensor(2, 3).unwrap(), 0);
    device.first(&x, &mut count).unwrap();
    let Err(DeviceError::Unsupported(why)) = device.second(&mut x) else { panic!("supported") };
    assert!(why.starts_with("Halves::second, on cpu"), "{why}");
    assert_eq!(count, 1);
}

#[test]
fn a_recorder_has_the_family_of_its_device() {
    let device = CpuDevice::new(1, Isa::detect()).unwrap();
    let mut recorder = Recorder::new(device, Names::default());
    const { assert!(<Recorder<CpuDevice, Names> as Halves>::IMPLEMENTED) };
    let (mut x, mut count) = (recorder.tensor(4, 3).unwrap(), 0);
    recorder.upload(&[1.0; 6], &mut x).unwrap();
    recorder.first(&x, &mut count).unwrap();
    assert!(matches!(recorder.second(&mut x), Err(DeviceError::Unsupported(_))));
    assert_eq!(recorder.observer().0, [("first", 2), ("second", 2)]);
    assert_eq!(count, 1);
}
