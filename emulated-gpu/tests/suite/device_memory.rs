//! Tests device memory through the methods that a driver uses.

use tutti_emulated_gpu::{DeviceMemory, Module};

#[test]
fn addresses_are_like_no_host_pointer_and_never_used_again() {
    let memory = DeviceMemory::new(1 << 20);
    let mut last = 0;
    for _ in 0..100 {
        let address = memory.allocate(1000).unwrap();
        assert_eq!(address % 512, 256);
        assert!(address > last + 1000 && address >> 48 == 0xd0, "{address:#x}");
        memory.free(address).unwrap();
        last = address;
    }
    assert_eq!(memory.used(), 0);
}

#[test]
fn the_capacity_is_a_limit() {
    let memory = DeviceMemory::new(1000);
    let first = memory.allocate(600).unwrap();
    let error = memory.allocate(401).unwrap_err();
    assert_eq!((error.bytes, error.free), (401, 400));
    memory.free(first).unwrap();
    memory.allocate(1000).unwrap();
}

#[test]
fn copies_stay_inside_of_allocations() {
    let memory = DeviceMemory::watched(1 << 20);
    let (a, b) = (memory.allocate(16).unwrap(), memory.allocate(16).unwrap());
    memory.copy_in(a, &[1, 2, 3, 4]).unwrap();
    memory.fill(a + 4, 5, &[7, 8]).unwrap();
    memory.copy_within(b + 2, a + 1, 8).unwrap();
    let mut out = [0; 8];
    memory.copy_out(b + 2, &mut out).unwrap();
    assert_eq!(out, [2, 3, 4, 7, 8, 7, 8, 7]);
    // Bytes 0 to 8 were written. The copy also copies the marks of written bytes.
    assert_eq!(memory.first_unwritten(a, 16).unwrap(), Some(a + 9));
    assert_eq!(memory.first_unwritten(b + 2, 8).unwrap(), None);
    assert_eq!(memory.first_unwritten(b, 8).unwrap(), Some(b));
    memory.copy_within(b, a + 8, 2).unwrap();
    assert_eq!(memory.first_unwritten(b, 2).unwrap(), Some(b + 1));
    assert!(memory.copy_in(a + 10, &[0; 7]).unwrap_err().to_string().contains("run past"));
    assert!(memory.copy_in(a - 1, &[0]).is_err());
    assert!(memory.copy_out(0x7fff_0000_0000, &mut out).unwrap_err().to_string().contains("no allocation"));
    assert!(memory.free(a + 1).is_err());
    memory.free(a).unwrap();
    let error = memory.copy_in(a, &[0]).unwrap_err();
    assert!(error.freed, "{error}");
    assert!(memory.free(a).unwrap_err().freed);
    assert_eq!(memory.allocation(b + 3), Some((b, 16)));
}

#[test]
fn variables_have_addresses_while_the_module_is_loaded() {
    let text = ".version 9.0\n.target sm_80\n.address_size 64\n.global .align 4 .u32 a[3] = {1, 2, 3};\n.const .align 8 .u64 b = 9;\n";
    let mut module = Module::decode(text).unwrap();
    let memory = DeviceMemory::new(20);
    module.load(&memory).unwrap();
    let mut out = [0; 12];
    memory.copy_out(module.variables[0].address.unwrap(), &mut out).unwrap();
    assert_eq!(out, [1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0]);
    module.unload(&memory);
    assert_eq!(memory.used(), 0);
    assert_eq!(module.variables[0].address, None);
    // Only one of the two variables fits, so loading fails and no variable stays allocated.
    let small = DeviceMemory::new(16);
    assert!(module.load(&small).is_err());
    assert_eq!(small.used(), 0);
}
