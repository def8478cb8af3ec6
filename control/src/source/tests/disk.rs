//! Manifest files in a few directories, and random changes of them.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::{fmt, fs};

use tempfile::TempDir;

use crate::xds::store::tests::generators::SeededRng;

/// The configured paths: two directories and a file.
const CONFIGURED: [&str; 3] = ["main", "side", "single.yaml"];
/// All directories; one can be missing, with its files.
const DIRECTORIES: [&str; 4] = ["main", "main/a", "main/b", "side"];
/// All possible files.
const FILES: [&str; 8] = [
    "main/a/p.yaml",
    "main/a/q.json",
    "main/b/r.yml",
    "main/x.yaml",
    "main/y.yaml",
    "main/z.yaml",
    "side/s.yaml",
    "single.yaml",
];
/// Tenants, each with a Service and an EndpointSlice.
pub(super) const TENANTS: u8 = 7;

/// The id of an object: its tenant, and whether it is the Service or the EndpointSlice.
pub(super) type Id = (u8, bool);

/// An object as written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Doc {
    pub(super) id: Id,
    value: u8,
    pub(super) fault: Fault,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    None,
    /// It has an invalid field.
    Invalid,
    /// It is well-formed but rejected by the compiler.
    Conflict,
}

impl Doc {
    pub(super) fn text(self) -> String {
        let Self { id: (n, is_service), value, fault } = self;
        if is_service {
            let vip = match fault {
                Fault::Conflict => "127.0.0.1".to_owned(),
                _ => format!("203.0.113.{}", n * 8 + value),
            };
            let ports = if fault == Fault::Invalid { "many" } else { "[{port: 80}]" };
            return format!(
                "{{apiVersion: v1, kind: Service,\n \
                 metadata: {{name: s{n}, namespace: t, annotations: {{vipgate.io/egress: \"true\"}}}},\n \
                 spec: {{type: LoadBalancer, ports: {ports}}},\n \
                 status: {{loadBalancer: {{ingress: [{{ip: {vip}}}]}}}}}}\n"
            );
        }
        let family = if fault == Fault::Invalid { "IPv5" } else { "IPv4" };
        let pods: Vec<String> = (0..=value).map(|pod| format!("{{addresses: [10.{n}.{value}.{pod}]}}")).collect();
        format!(
            "{{apiVersion: discovery.k8s.io/v1, kind: EndpointSlice,\n metadata: {{name: s{n}, namespace: t, \
             labels: {{kubernetes.io/service-name: s{n}}}}},\n addressType: {family}, endpoints: [{}]}}\n",
            pods.join(", ")
        )
    }
}

/// The content of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Content {
    Docs(Vec<Doc>),
    /// A truncated manifest.
    Truncated(String),
    NotYaml,
    NotUtf8,
    Empty(&'static str),
    EmptyList,
    DanglingSymlink,
}

/// Whether the file has YAML documents; otherwise it has one List.
fn is_yaml(name: &str) -> bool {
    Path::new(name).extension().is_some_and(|extension| extension == "yaml")
}

/// The text of a file with these objects: YAML documents, or one List.
pub(super) fn text(name: &str, docs: &[Doc]) -> String {
    let texts: Vec<String> = docs.iter().copied().map(Doc::text).collect();
    if is_yaml(name) {
        return texts.join("---\n");
    }
    let item = |text: &String| format!("- {}\n", text.trim_end().replace('\n', "\n  "));
    let items = texts.iter().map(item).collect::<Vec<_>>().concat();
    format!("apiVersion: v1\nitems:\n{items}kind: List\n")
}

/// The observable content of a file.
#[derive(Clone, Debug)]
pub(super) enum ObservedContent {
    Docs(Vec<Doc>),
    Truncated(String),
    Unreadable,
    Empty,
    EmptyList,
}

/// The observable state: files by path, and unavailable paths: whether they are missing, and whether they are
/// configured.
#[derive(Clone, Debug, Default)]
pub(super) struct DiskState {
    pub(super) files: BTreeMap<String, ObservedContent>,
    pub(super) unavailable: Vec<(String, bool, bool)>,
}

/// The files.
#[derive(Debug)]
pub(super) struct Disk {
    root: TempDir,
    files: BTreeMap<&'static str, Content>,
    missing: Option<&'static str>,
}

impl fmt::Display for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "missing {:?}", self.missing)?;
        for (name, content) in &self.files {
            write!(f, "; {name}: ")?;
            match content {
                Content::Docs(docs) => docs.iter().try_for_each(|doc| {
                    let (n, is_service) = doc.id;
                    write!(
                        f,
                        "{}{n}={}{} ",
                        if is_service { 's' } else { 'e' },
                        doc.value,
                        match doc.fault {
                            Fault::None => "",
                            Fault::Invalid => "!",
                            Fault::Conflict => "?",
                        }
                    )
                })?,
                other => write!(f, "{other:?}")?,
            }
        }
        Ok(())
    }
}

impl Disk {
    /// A random initial state: some files or none, perhaps with a missing directory.
    pub(super) fn new(dice: &mut SeededRng) -> Self {
        let mut disk = Self { root: tempfile::tempdir().unwrap(), files: BTreeMap::new(), missing: None };
        for directory in DIRECTORIES {
            fs::create_dir_all(disk.at(directory)).unwrap();
        }
        if !dice.one_in(6) {
            for _ in 0..3 + dice.below(5) {
                disk.add(dice);
            }
        }
        if dice.one_in(8) {
            disk.move_directory(dice);
        }
        disk
    }

    fn at(&self, name: &str) -> PathBuf {
        self.root.path().join("policy").join(name)
    }

    /// The configured paths.
    pub(super) fn paths(&self) -> Vec<PathBuf> {
        CONFIGURED.map(|name| self.at(name)).to_vec()
    }

    /// The observable state.
    pub(super) fn state(&self) -> DiskState {
        let name = |name: &str| self.at(name).display().to_string();
        let mut state = DiskState::default();
        let is_missing = |file: &str| self.missing.is_some_and(|it| file.starts_with(&format!("{it}/")));
        if let Some(directory) = self.missing {
            state.unavailable.push((name(directory), true, CONFIGURED.contains(&directory)));
        }
        if !self.files.contains_key("single.yaml") {
            state.unavailable.push((name("single.yaml"), true, true));
        }
        for (file, content) in self.files.iter().filter(|(file, _)| !is_missing(file)) {
            let content = match content {
                Content::DanglingSymlink => {
                    let is_configured = CONFIGURED.contains(file);
                    state.unavailable.push((name(file), is_configured, is_configured));
                    continue;
                }
                Content::Docs(docs) if docs.is_empty() && is_yaml(file) => ObservedContent::Empty,
                Content::Docs(docs) => ObservedContent::Docs(docs.clone()),
                Content::Truncated(text) => ObservedContent::Truncated(text.clone()),
                Content::NotYaml | Content::NotUtf8 => ObservedContent::Unreadable,
                Content::Empty(_) => ObservedContent::Empty,
                Content::EmptyList => ObservedContent::EmptyList,
            };
            state.files.insert(name(file), content);
        }
        state
    }

    /// Makes a random change; `known` are objects in force, which may be moved to other files. Returns the class of
    /// change.
    pub(super) fn change(&mut self, dice: &mut SeededRng, known: &BTreeSet<Id>) -> &'static str {
        loop {
            let class = match dice.below(22) {
                0 | 1 => self.add(dice),
                2 => self.remove(dice),
                3 => self.rename(dice),
                4 => self.swap(dice),
                5 => self.put(dice, |_, _| Some((Content::Empty(""), "files: emptied"))),
                6 => self.put(dice, |_, _| Some((Content::Empty("\n  # empty\n"), "files: emptied"))),
                7 => self.put(dice, |_, _| Some((Content::NotYaml, "files: not YAML"))),
                8 => self.put(dice, |_, _| Some((Content::NotUtf8, "files: not UTF-8"))),
                9 => self.put(dice, |_, _| Some((Content::EmptyList, "files: replaced by an empty list"))),
                10 => self.put(dice, |_, _| Some((Content::DanglingSymlink, "files: dangling symlink"))),
                11 => self.truncate(dice),
                12 => self.move_directory(dice),
                13 if dice.one_in(3) => self.remove_all(),
                14 => self.repair(dice, known),
                15 => self.move_object(dice, known, false),
                16 => self.move_object(dice, known, true),
                17 => self.edit(dice, Some(Fault::Invalid), "objects: invalid"),
                18 => self.edit(dice, Some(Fault::Conflict), "objects: conflict"),
                19 => self.edit(dice, None, "objects: removed"),
                20 => self.put(dice, |content, _| Some((content.clone(), "files: rewritten unchanged"))),
                _ => self.edit(dice, Some(Fault::None), "files: edited"),
            };
            if let Some(class) = class {
                return class;
            }
        }
    }

    /// The files outside of the missing directory.
    fn present(&self) -> Vec<&'static str> {
        let is_missing = |file: &str| self.missing.is_some_and(|it| file.starts_with(&format!("{it}/")));
        self.files.keys().copied().filter(|file| !is_missing(file)).collect()
    }

    /// Objects that no file has, even in the missing directory.
    fn unused(&self) -> Vec<Id> {
        let docs = self.files.values().flat_map(|content| match content {
            Content::Docs(docs) => docs.iter().map(|doc| doc.id).collect(),
            // A truncated file may have any of its objects, so they count as used.
            Content::Truncated(text) => (0..TENANTS)
                .filter(|n| text.contains(&format!("name: s{n}")))
                .flat_map(|n| [(n, false), (n, true)])
                .collect(),
            _ => Vec::new(),
        });
        let taken: BTreeSet<Id> = docs.collect();
        let all = (0..TENANTS).flat_map(|n| [(n, false), (n, true)]);
        all.filter(|id| !taken.contains(id)).collect()
    }

    fn write(&mut self, file: &'static str, content: Content) {
        let path = self.at(file);
        let _ = fs::remove_file(&path);
        match &content {
            Content::Docs(docs) => fs::write(path, text(file, docs)).unwrap(),
            Content::Truncated(text) => fs::write(path, text).unwrap(),
            Content::NotYaml => fs::write(path, "kind: [unclosed\nitems: }").unwrap(),
            Content::NotUtf8 => fs::write(path, [0x6b, 0xff, 0xfe]).unwrap(),
            Content::Empty(text) => fs::write(path, text).unwrap(),
            Content::EmptyList => fs::write(path, "apiVersion: v1\nitems: []\nkind: List\n").unwrap(),
            Content::DanglingSymlink => symlink("/nonexistent/manifest", path).unwrap(),
        }
        self.files.insert(file, content);
    }

    /// Adds a file with objects that no other file has now.
    fn add(&mut self, dice: &mut SeededRng) -> Option<&'static str> {
        let is_missing = |file: &&str| self.missing.is_some_and(|it| file.starts_with(&format!("{it}/")));
        let names: Vec<_> =
            FILES.into_iter().filter(|file| !self.files.contains_key(file) && !is_missing(file)).collect();
        let name = *names.get(dice.below(names.len().max(1)))?;
        let docs = self.new_docs(dice)?;
        self.write(name, Content::Docs(docs));
        Some("files: added")
    }

    /// A few objects that no file has, mostly of whole tenants.
    fn new_docs(&self, dice: &mut SeededRng) -> Option<Vec<Doc>> {
        let unused = self.unused();
        let mut docs: Vec<Doc> = Vec::new();
        for _ in 0..=dice.below(2) {
            let (n, _) = *unused.get(dice.below(unused.len().max(1)))?;
            for id in [(n, true), (n, false)] {
                let is_new = docs.iter().all(|doc| doc.id != id);
                if unused.contains(&id) && is_new && !dice.one_in(6) {
                    docs.push(Doc { id, value: dice.below(4) as u8, fault: Fault::None });
                }
            }
        }
        (!docs.is_empty()).then_some(docs)
    }

    fn pick(&self, dice: &mut SeededRng) -> Option<&'static str> {
        let files = self.present();
        files.get(dice.below(files.len().max(1))).copied()
    }

    /// Replaces the content of a random file.
    fn put(
        &mut self,
        dice: &mut SeededRng,
        make: impl FnOnce(&Content, &mut SeededRng) -> Option<(Content, &'static str)>,
    ) -> Option<&'static str> {
        let file = self.pick(dice)?;
        let (content, class) = make(&self.files[file], dice)?;
        self.write(file, content);
        Some(class)
    }

    fn remove(&mut self, dice: &mut SeededRng) -> Option<&'static str> {
        let file = self.pick(dice)?;
        fs::remove_file(self.at(file)).unwrap();
        self.files.remove(file);
        Some("files: removed")
    }

    #[expect(clippy::unnecessary_wraps, reason = "the signature of all changes, some of which may be impossible")]
    fn remove_all(&mut self) -> Option<&'static str> {
        for file in self.present() {
            fs::remove_file(self.at(file)).unwrap();
            self.files.remove(file);
        }
        Some("files: all removed")
    }

    fn rename(&mut self, dice: &mut SeededRng) -> Option<&'static str> {
        let (from, to) = (self.pick(dice)?, FILES[dice.below(FILES.len())]);
        let is_missing = self.missing.is_some_and(|it| to.starts_with(&format!("{it}/")));
        // The extension determines the format of the text.
        if is_missing || self.files.contains_key(to) || is_yaml(from) != is_yaml(to) {
            return None;
        }
        fs::rename(self.at(from), self.at(to)).unwrap();
        let content = self.files.remove(from)?;
        self.files.insert(to, content);
        Some("files: renamed")
    }

    /// Swaps the content of two files.
    fn swap(&mut self, dice: &mut SeededRng) -> Option<&'static str> {
        let (one, other) = (self.pick(dice)?, self.pick(dice)?);
        if one == other || is_yaml(one) != is_yaml(other) {
            return None;
        }
        let (first, second) = (self.files.remove(one)?, self.files.remove(other)?);
        self.write(one, second);
        self.write(other, first);
        Some("files: swapped")
    }

    /// Truncates a file at a random byte.
    fn truncate(&mut self, dice: &mut SeededRng) -> Option<&'static str> {
        let file = self.pick(dice)?;
        let Content::Docs(docs) = &self.files[file] else { return None };
        let mut text = text(file, docs);
        text.truncate(dice.below(text.len().max(1)));
        self.write(file, Content::Truncated(text));
        Some("files: truncated")
    }

    /// Puts objects into a file that had none or was invalid.
    fn repair(&mut self, dice: &mut SeededRng, known: &BTreeSet<Id>) -> Option<&'static str> {
        let file = self.pick(dice)?;
        if matches!(self.files[file], Content::Docs(_)) {
            return None;
        }
        let before = self.files.insert(file, Content::EmptyList)?;
        let Some(mut docs) = self.new_docs(dice) else {
            self.files.insert(file, before);
            return None;
        };
        let unused = self.unused();
        docs.extend(known.iter().filter(|id| unused.contains(id)).take(2).map(|id| Doc {
            id: *id,
            value: 3,
            fault: Fault::None,
        }));
        docs.sort_by_key(|doc| doc.id);
        docs.dedup_by_key(|doc| doc.id);
        self.write(file, Content::Docs(docs));
        Some("files: repaired")
    }

    /// Moves an object, or a whole tenant, to another file.
    fn move_object(&mut self, dice: &mut SeededRng, known: &BTreeSet<Id>, whole: bool) -> Option<&'static str> {
        let known: Vec<Id> = known.iter().copied().collect();
        let id = *known.get(dice.below(known.len().max(1)))?;
        let ids = if whole { vec![(id.0, false), (id.0, true)] } else { vec![id] };
        let to = self.pick(dice)?;
        let present = self.present();
        let has =
            |content: &Content| matches!(content, Content::Docs(docs) if docs.iter().any(|doc| ids.contains(&doc.id)));
        let holders: Vec<_> = self.files.iter().filter(|(_, content)| has(content)).map(|(file, _)| *file).collect();
        if holders.iter().any(|file| *file == to || !present.contains(file)) {
            return None;
        }
        let mut moved = Vec::new();
        for file in holders {
            let Content::Docs(docs) = self.files[file].clone() else { continue };
            let (taken, rest): (Vec<Doc>, Vec<Doc>) = docs.into_iter().partition(|doc| ids.contains(&doc.id));
            moved.extend(taken);
            self.write(file, Content::Docs(rest));
        }
        let unused = self.unused();
        // Retained objects of unreadable files.
        let retained =
            ids.iter().filter(|id| known.contains(id) && moved.iter().all(|doc| doc.id != **id) && unused.contains(id));
        let retained: Vec<Doc> =
            retained.map(|id| Doc { id: *id, value: dice.below(4) as u8, fault: Fault::None }).collect();
        moved.extend(retained);
        if moved.is_empty() {
            return None;
        }
        let mut docs = match self.files[to].clone() {
            Content::Docs(docs) => docs,
            _ => Vec::new(),
        };
        docs.extend(moved);
        self.write(to, Content::Docs(docs));
        Some(if whole { "objects: tenant moved" } else { "objects: moved" })
    }

    /// Changes, invalidates, removes or adds an object of a file.
    fn edit(&mut self, dice: &mut SeededRng, fault: Option<Fault>, class: &'static str) -> Option<&'static str> {
        let file = self.pick(dice)?;
        let Content::Docs(mut docs) = self.files[file].clone() else { return None };
        let at = dice.below(docs.len().max(1));
        match fault {
            None => drop((!docs.is_empty()).then(|| docs.remove(at))?),
            Some(Fault::None) if dice.one_in(3) => {
                docs.extend(self.new_docs(dice)?);
                self.write(file, Content::Docs(docs));
                return Some("objects: added");
            }
            Some(fault) => {
                let doc = docs.get_mut(at)?;
                if fault == Fault::Conflict && !doc.id.1 {
                    return None;
                }
                (doc.fault, doc.value) = (fault, dice.below(4) as u8);
            }
        }
        self.write(file, Content::Docs(docs));
        Some(class)
    }

    /// Moves a directory away with its files, or restores it.
    #[expect(clippy::unnecessary_wraps, reason = "the signature of all changes, some of which may be impossible")]
    fn move_directory(&mut self, dice: &mut SeededRng) -> Option<&'static str> {
        let aside = self.root.path().join("aside");
        if let Some(directory) = self.missing.take() {
            fs::rename(aside, self.at(directory)).unwrap();
            return Some("directories: restored");
        }
        let directory = DIRECTORIES[dice.below(DIRECTORIES.len())];
        fs::rename(self.at(directory), aside).unwrap();
        let is_all = self.files.keys().all(|file| file.starts_with(&format!("{directory}/")));
        self.missing = Some(directory);
        Some(if is_all && !self.files.is_empty() {
            "directories: missing, with all files"
        } else {
            "directories: missing"
        })
    }
}
