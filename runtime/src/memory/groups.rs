//! The control groups that limit this process's memory: its own group, and every group around it.
//!
//! `/proc/self/cgroup` names the process's group in each hierarchy, and `/proc/self/mountinfo` says where a hierarchy
//! is mounted and which of its groups is the root of the mount. A container may see the name of its group as the host
//! does, or as its own namespace does. If no mount shows the group, the mounts' roots are the process's groups: a
//! container has no more than its own. Linux: `Documentation/admin-guide/cgroup-v1/memory.rst` and
//! `Documentation/admin-guide/cgroup-v2.rst`.

use std::{
    fs,
    path::{Component, Path, PathBuf},
};

use super::Cached;

/// Version 1 writes this or a greater number for a group without a limit: the largest number of pages, in bytes.
const NO_LIMIT: u64 = 1 << 62;

/// A control group with the controller of memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Group {
    pub path: PathBuf,
    pub version: Version,
}

/// The version of a hierarchy of control groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Version {
    One,
    Two,
}

impl Version {
    /// The limit of a group and the bytes that it uses; `None` if the group has no limit or no controller of memory.
    pub fn limit_and_use(self, group: &Path) -> Option<(u64, u64)> {
        let [limit, used] = match self {
            Self::One => ["memory.limit_in_bytes", "memory.usage_in_bytes"],
            Self::Two => ["memory.max", "memory.current"],
        };
        let number = |name: &str| fs::read_to_string(group.join(name)).ok()?.trim().parse::<u64>().ok();
        // A group of version 2 without a limit has "max", which is no number.
        Some((number(limit).filter(|limit| *limit < NO_LIMIT)?, number(used)?))
    }

    /// Bytes of a group and of the groups inside it that are cached contents of files.
    pub fn cached_bytes(self, group: &Path, cached: Cached) -> u64 {
        let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
        let bytes = |name: &str| {
            let line = stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
            line.and_then(|bytes| bytes.trim().parse::<u64>().ok())
        };
        // In version 1, only the totals count the groups inside.
        let of = |name: &str| match self {
            Self::One => bytes(&format!("total_{name}")).or_else(|| bytes(name)).unwrap_or(0),
            Self::Two => bytes(name).unwrap_or(0),
        };
        match cached {
            Cached::Idle => of("inactive_file"),
            // Version 1 does not say what of the kernel's own memory can be dropped.
            Cached::All => {
                of("inactive_file").saturating_add(of("active_file")).saturating_add(of("slab_reclaimable"))
            }
        }
    }

    /// True if the parent's limit holds for its groups. In version 1, a parent may say that it does not.
    fn limits_groups_inside(self, parent: &Path) -> bool {
        match self {
            Self::Two => true,
            Self::One => fs::read_to_string(parent.join("memory.use_hierarchy"))
                .map_or(true, |text| text.trim() != "0"),
        }
    }
}

/// A mounted hierarchy that may limit memory.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Mount {
    version: Version,
    /// The group that is the root of the mount.
    root: PathBuf,
    /// The directory of that group.
    point: PathBuf,
}

/// The groups that limit the memory of the process whose `/proc/self` is under `root`: from the process's own group to
/// the outermost.
pub(super) fn of_process(root: &Path) -> Vec<Group> {
    let read = |name: &str| fs::read_to_string(root.join("proc/self").join(name)).unwrap_or_default();
    let (named, mounted) = (read("cgroup"), read("mountinfo"));
    let mut groups = Vec::new();
    for (version, name) in named.lines().filter_map(named_group) {
        let mounts = || {
            let mounts = mounted.lines().filter_map(mount).filter(|mount| mount.version == version);
            mounts.map(|mount| Mount {
                point: root.join(mount.point.strip_prefix("/").unwrap_or(&mount.point)),
                ..mount
            })
        };
        let mut shown: Vec<_> =
            mounts().filter_map(|mount| Some((mount.shown(Path::new(name))?, mount))).collect();
        if shown.is_empty() {
            shown.extend(mounts().map(|mount| (mount.point.clone(), mount)));
        }
        for path in shown.into_iter().flat_map(|(path, mount)| mount.chain(path)) {
            let group = Group { path, version };
            if !groups.contains(&group) {
                groups.push(group);
            }
        }
    }
    groups
}

impl Mount {
    /// The directory of a group, if this mount shows the group.
    fn shown(&self, name: &Path) -> Option<PathBuf> {
        let is_plain = |inside: &&Path| inside.components().all(|part| matches!(part, Component::Normal(_)));
        let inside = name.strip_prefix(&self.root).ok().filter(is_plain)?;
        Some(self.point.join(inside)).filter(|path| path.is_dir())
    }

    /// The directories of a group and of all groups around it that limit it, inside this mount.
    fn chain(&self, group: PathBuf) -> Vec<PathBuf> {
        let mut chain = vec![group];
        while let Some(parent) = chain.last().and_then(|path| path.parent()) {
            if !parent.starts_with(&self.point) || !self.version.limits_groups_inside(parent) {
                break;
            }
            chain.push(parent.to_owned());
        }
        chain
    }
}

/// Reads a line `number:controllers:group` of `/proc/self/cgroup`. `None` if the hierarchy does not limit memory.
fn named_group(line: &str) -> Option<(Version, &str)> {
    let mut fields = line.splitn(3, ':');
    let (number, controllers, name) = (fields.next()?, fields.next()?, fields.next()?);
    match (number, controllers) {
        ("0", "") => Some((Version::Two, name)),
        (_, controllers) if controllers.split(',').any(|one| one == "memory") => Some((Version::One, name)),
        _ => None,
    }
}

/// Reads a line of `/proc/self/mountinfo`: `36 35 98:0 ROOT POINT OPTIONS [TAG...] - TYPE SOURCE OPTIONS`.
fn mount(line: &str) -> Option<Mount> {
    let (mount, kind) = line.split_once(" - ")?;
    let (mut mount, mut kind) = (mount.split(' ').skip(3), kind.split(' '));
    let (root, point) = (unescaped(mount.next()?), unescaped(mount.next()?));
    let version = match kind.next()? {
        "cgroup2" => Version::Two,
        "cgroup" if kind.nth(1)?.split(',').any(|option| option == "memory") => Version::One,
        _ => return None,
    };
    Some(Mount { version, root: root.into(), point: point.into() })
}

/// Replaces the octal codes of blanks and backslashes in a path of `mountinfo`.
fn unescaped(path: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .iter()
        .fold(path.to_owned(), |path, (code, character)| path.replace(code, character))
}
