use std::fs;

use super::*;

/// A made-up system: files under a temporary directory.
struct System(tempfile::TempDir);

const GIB: u64 = 1 << 30;
const V1: &str = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n";
const V2: &str = "31 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
const NO_LIMIT_OF_V1: u64 = 9_223_372_036_854_771_712;

impl System {
    /// A machine with 64 GiB of free memory.
    fn new(cgroup: &str, mountinfo: &str) -> Self {
        let system = Self(tempfile::tempdir().unwrap());
        system.file("proc/meminfo", &format!("MemTotal: 9 kB\nMemAvailable: {} kB\n", 64 * GIB / 1024));
        system.file("proc/self/cgroup", cgroup);
        system.file("proc/self/mountinfo", mountinfo);
        system
    }

    fn file(&self, path: &str, text: &str) {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// A group of version 1 at a path under `/sys/fs/cgroup/memory`.
    fn v1(self, group: &str, limit: u64, used: u64) -> Self {
        let file =
            |name: &str, text: String| self.file(&format!("sys/fs/cgroup/memory{group}/{name}"), &text);
        file("memory.limit_in_bytes", format!("{limit}\n"));
        file("memory.usage_in_bytes", format!("{used}\n"));
        file("memory.use_hierarchy", "1\n".into());
        self
    }

    /// A group of version 2 at a path under `/sys/fs/cgroup`.
    fn v2(self, group: &str, limit: &str, used: u64) -> Self {
        let file = |name: &str, text: String| self.file(&format!("sys/fs/cgroup{group}/{name}"), &text);
        file("memory.max", format!("{limit}\n"));
        file("memory.current", format!("{used}\n"));
        self
    }

    fn stat(self, group: &str, text: &str) -> Self {
        self.file(&format!("sys/fs/cgroup{group}/memory.stat"), text);
        self
    }

    fn free(&self) -> FreeMemory {
        free_under(self.0.path(), Cached::All).unwrap()
    }

    /// The free bytes and the group whose limit they are under.
    fn group(&self) -> (u64, String) {
        let FreeMemory { bytes, bound, .. } = self.free();
        match bound {
            Bound::Machine => (bytes, "machine".into()),
            Bound::Group { path, .. } => (bytes, path.to_str().unwrap().into()),
        }
    }
}

#[test]
fn free_memory_of_the_machine_is_read_in_bytes() {
    assert_eq!(kibibytes("MemTotal: 9 kB\nMemAvailable:    2048 kB\n", "MemAvailable:"), Some(2 << 20));
    assert_eq!(kibibytes("MemTotal: 9 kB\n", "MemAvailable:"), None);
    assert_eq!(kibibytes("Name:\tx\nVmRSS:\t    2048 kB\n", "VmRSS:"), Some(2 << 20));
    assert_eq!(kibibytes("VmRSS: many", "VmRSS:"), None);
    assert_eq!(kibibytes("MemAvailable: 99999999999999999999 kB\n", "MemAvailable:"), None);
    assert_eq!(kibibytes("MemAvailable: 18446744073709551615 kB\n", "MemAvailable:"), None);
}

#[test]
fn a_machine_without_limits_has_what_it_has() {
    let system = System::new("4:memory:/\n0::/\n", V1).v1("", NO_LIMIT_OF_V1, GIB);
    assert_eq!(system.group(), (64 * GIB, "machine".into()));
    let system = System::new("0::/init.scope\n", V2).v2("/init.scope", "max", GIB);
    assert_eq!(system.group(), (64 * GIB, "machine".into()));
    assert_eq!(System::new("", "").group(), (64 * GIB, "machine".into()));
}

#[test]
fn a_limit_above_the_machines_memory_bounds_nothing() {
    let system = System::new("0::/a\n", V2).v2("/a", &(100 * GIB).to_string(), GIB);
    assert_eq!(system.group(), (64 * GIB, "machine".into()));
}

#[test]
fn the_limit_of_the_own_group_of_version_1_bounds() {
    // The group's path is as in a container of Docker with the host's names: the mount's root is the group itself.
    let mountinfo = "1 2 0:32 /docker/ab /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n";
    let system = System::new("5:memory:/docker/ab\n", mountinfo).v1("", 8 * GIB, 3 * GIB);
    assert_eq!(system.group(), (5 * GIB, "/sys/fs/cgroup/memory".into()));
    // The group's path is as on a host.
    let system = System::new("4:cpu,memory:/process/ab\n", V1).v1("", NO_LIMIT_OF_V1, 9 * GIB).v1(
        "/process/ab",
        8 * GIB,
        3 * GIB,
    );
    assert_eq!(system.group(), (5 * GIB, "/sys/fs/cgroup/memory/process/ab".into()));
}

#[test]
fn of_nested_groups_the_one_that_leaves_least_bounds() {
    for (outer, inner, bound) in [(4, 8, "/a"), (8, 4, "/a/b")] {
        let system = System::new("4:memory:/a/b\n", V1)
            .v1("", NO_LIMIT_OF_V1, 9 * GIB)
            .v1("/a", outer * GIB, 2 * GIB)
            .v1("/a/b", inner * GIB, 2 * GIB);
        assert_eq!(system.group(), (2 * GIB, format!("/sys/fs/cgroup/memory{bound}")));
        let system = System::new("0::/a/b\n", V2).v2("/a", &(outer * GIB).to_string(), 2 * GIB).v2(
            "/a/b",
            &(inner * GIB).to_string(),
            2 * GIB,
        );
        assert_eq!(system.group(), (2 * GIB, format!("/sys/fs/cgroup{bound}")));
    }
}

#[test]
fn the_use_of_an_outer_group_counts_what_others_in_it_use() {
    let system = System::new("0::/a/b\n", V2).v2("/a", &(8 * GIB).to_string(), 7 * GIB).v2(
        "/a/b",
        &(4 * GIB).to_string(),
        GIB,
    );
    assert_eq!(system.group(), (GIB, "/sys/fs/cgroup/a".into()));
}

#[test]
fn a_parent_of_version_1_without_hierarchy_does_not_bound() {
    let system = System::new("4:memory:/a/b\n", V1).v1("/a", GIB, 0).v1("/a/b", 4 * GIB, GIB);
    system.file("sys/fs/cgroup/memory/a/memory.use_hierarchy", "0\n");
    assert_eq!(system.group(), (3 * GIB, "/sys/fs/cgroup/memory/a/b".into()));
}

#[test]
fn units_and_slices_of_systemd_bound() {
    let unit = "/system.slice/tutti-conductor.service";
    let system = System::new(&format!("0::{unit}\n"), V2).v2("/system.slice", "max", 20 * GIB).v2(
        unit,
        &(16 * GIB).to_string(),
        GIB,
    );
    assert_eq!(system.group(), (15 * GIB, format!("/sys/fs/cgroup{unit}")));
    let scope = "/user.slice/user-1000.slice/user@1000.service/app.slice/run-u7.scope";
    let system = System::new(&format!("0::{scope}\n"), V2)
        .v2("/user.slice/user-1000.slice", &(4 * GIB).to_string(), 3 * GIB)
        .v2(scope, "max", GIB);
    assert_eq!(system.group(), (GIB, "/sys/fs/cgroup/user.slice/user-1000.slice".into()));
}

#[test]
fn a_hybrid_of_both_versions_is_bounded_by_the_hierarchy_with_the_controller() {
    let mountinfo = format!("{V1}36 31 0:27 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n");
    let unit = "/system.slice/a.service";
    let cgroup = format!("9:memory:{unit}\n1:name=systemd:{unit}\n0::{unit}\n");
    let system = System::new(&cgroup, &mountinfo).v1(unit, 4 * GIB, GIB);
    assert_eq!(system.group(), (3 * GIB, format!("/sys/fs/cgroup/memory{unit}")));
}

#[test]
fn a_group_that_the_mount_does_not_show_is_the_mounts_root() {
    // The process was moved into a group outside of its namespace, or has the host's name in a container's mount.
    for name in ["/../other", "/kubepods/pod1/ab"] {
        let system = System::new(&format!("0::{name}\n"), V2).v2("", &(4 * GIB).to_string(), GIB);
        assert_eq!(system.group(), (3 * GIB, "/sys/fs/cgroup".into()));
    }
}

#[test]
fn a_mount_of_other_groups_does_not_bound() {
    // A container that also has its host's hierarchy, or another container's part of it.
    let mountinfo = format!("{V2}1 2 0:26 /other /mnt/other rw - cgroup2 cgroup2 rw\n");
    let system = System::new("0::/a\n", &mountinfo).v2("/a", &(4 * GIB).to_string(), GIB);
    system.file("mnt/other/memory.max", "1073741824\n");
    system.file("mnt/other/memory.current", "0\n");
    assert_eq!(system.group(), (3 * GIB, "/sys/fs/cgroup/a".into()));
}

#[test]
fn a_mount_point_with_a_blank_is_found() {
    let mountinfo = "1 2 0:26 / /sys/fs/c\\040g rw - cgroup2 cgroup2 rw\n";
    let system = System::new("0::/a:b\n", mountinfo);
    system.file("sys/fs/c g/a:b/memory.max", "1073741824\n");
    system.file("sys/fs/c g/a:b/memory.current", "0\n");
    assert_eq!(system.group(), (GIB, "/sys/fs/c g/a:b".into()));
}

#[test]
fn cached_files_of_a_group_are_free() {
    let limit = (4 * GIB).to_string();
    let stat = "anon 5\ninactive_file 1073741824\nactive_file 536870912\nfile 9\n";
    let system = System::new("0::/a\n", V2).v2("/a", &limit, 3 * GIB).stat("/a", stat);
    assert_eq!(system.free().bytes, 2 * GIB + GIB / 2);
    assert_eq!(free_under(system.0.path(), Cached::Idle).unwrap().bytes, 2 * GIB);
    // In version 1, the totals count the groups inside.
    let stat =
        "inactive_file 1\nactive_file 2\ntotal_inactive_file 1073741824\ntotal_active_file 536870912\n";
    let system = System::new("4:memory:/a\n", V1).v1("/a", 4 * GIB, 3 * GIB).stat("/memory/a", stat);
    assert_eq!(system.free().bytes, 2 * GIB + GIB / 2);
    // A file without numbers frees nothing.
    let system = System::new("0::/a\n", V2).v2("/a", &limit, 3 * GIB).stat("/a", "inactive_file\n");
    assert_eq!(system.free().bytes, GIB);
}

#[test]
fn a_group_over_its_limit_has_nothing_free() {
    let system = System::new("0::/a\n", V2).v2("/a", &GIB.to_string(), 2 * GIB);
    assert_eq!(system.free().bytes, 0);
}

#[test]
fn a_system_that_says_nothing_is_not_bounded() {
    let empty = tempfile::tempdir().unwrap();
    assert_eq!(free_under(empty.path(), Cached::All), None);
}

#[test]
fn the_bound_is_told_in_words() {
    let system = System::new("0::/a\n", V2).v2("/a", &(2 * GIB).to_string(), GIB / 2);
    let said = "1.5 GiB are free under the limit of 2.0 GiB of the control group /sys/fs/cgroup/a";
    assert_eq!(system.free().to_string(), said);
    assert_eq!(System::new("", "").free().to_string(), "64.0 GiB are free on this machine");
    assert_eq!(Size(1023).to_string(), "1023 bytes");
}
