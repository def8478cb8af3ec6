//! Files in a few folders, and what happens to them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::xds::book::tests::world::Dice;

/// What the configuration names: two folders and a file.
const NAMED: [&str; 3] = ["main", "side", "single.yaml"];
/// All folders; one can be away, with what is in it.
const FOLDERS: [&str; 4] = ["main", "main/a", "main/b", "side"];
/// All files that there may be.
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
/// Tenants: each has a Service and a slice.
pub(super) const TENANTS: u8 = 7;

/// What names an object: its tenant, and whether it is the Service or the slice.
pub(super) type Id = (u8, bool);

/// An object as it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Doc {
    pub(super) id: Id,
    value: u8,
    pub(super) fault: Fault,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    None,
    /// It means nothing.
    Wrong,
    /// It means something that can't be.
    Contradiction,
}

impl Doc {
    pub(super) fn text(self) -> String {
        let Self { id: (n, is_service), value, fault } = self;
        if is_service {
            let vip = match fault {
                Fault::Contradiction => "127.0.0.1".to_owned(),
                _ => format!("203.0.113.{}", n * 8 + value),
            };
            let ports = if fault == Fault::Wrong { "many" } else { "[{port: 80}]" };
            return format!(
                "{{apiVersion: v1, kind: Service,\n metadata: {{name: s{n}, namespace: t, annotations: {{vipgate.io/egress: \"true\"}}}},\n \
                 spec: {{type: LoadBalancer, ports: {ports}}},\n status: {{loadBalancer: {{ingress: [{{ip: {vip}}}]}}}}}}\n"
            );
        }
        let family = if fault == Fault::Wrong { "IPv5" } else { "IPv4" };
        let pods: Vec<String> = (0..=value).map(|pod| format!("{{addresses: [10.{n}.{value}.{pod}]}}")).collect();
        format!(
            "{{apiVersion: discovery.k8s.io/v1, kind: EndpointSlice,\n metadata: {{name: s{n}, namespace: t, \
             labels: {{kubernetes.io/service-name: s{n}}}}},\n addressType: {family}, endpoints: [{}]}}\n",
            pods.join(", ")
        )
    }
}

/// What is in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Content {
    Docs(Vec<Doc>),
    /// The beginning of a text.
    Cut(String),
    NotYaml,
    NotUtf8,
    Blank(&'static str),
    Nothing,
    LinkToNothing,
}

/// Documents one after the other; else it is one list.
fn is_yaml(name: &str) -> bool {
    Path::new(name).extension().is_some_and(|extension| extension == "yaml")
}

/// The text of a file with these objects: documents one after the other, or one list.
pub(super) fn text(name: &str, docs: &[Doc]) -> String {
    let texts: Vec<String> = docs.iter().copied().map(Doc::text).collect();
    if is_yaml(name) {
        return texts.join("---\n");
    }
    let item = |text: &String| format!("- {}\n", text.trim_end().replace('\n', "\n  "));
    let items = texts.iter().map(item).collect::<Vec<_>>().concat();
    format!("apiVersion: v1\nitems:\n{items}kind: List\n")
}

/// What whoever looks at a file finds.
#[derive(Clone, Debug)]
pub(super) enum Look {
    Docs(Vec<Doc>),
    Cut(String),
    Unreadable,
    Blank,
    Nothing,
}

/// All that there is to see: files by path, and places that can't be looked into: whether they are missing, and named.
#[derive(Clone, Debug, Default)]
pub(super) struct Sight {
    pub(super) files: BTreeMap<String, Look>,
    pub(super) hidden: Vec<(String, bool, bool)>,
}

/// The files.
#[derive(Debug)]
pub(super) struct Disk {
    root: TempDir,
    files: BTreeMap<&'static str, Content>,
    away: Option<&'static str>,
}

impl fmt::Display for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "away {:?}", self.away)?;
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
                            Fault::Wrong => "!",
                            Fault::Contradiction => "?",
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
    /// Some files, or none, or not even all folders.
    pub(super) fn new(dice: &mut Dice) -> Self {
        let mut disk = Self { root: tempfile::tempdir().unwrap(), files: BTreeMap::new(), away: None };
        for folder in FOLDERS {
            fs::create_dir_all(disk.at(folder)).unwrap();
        }
        if !dice.once_in(6) {
            for _ in 0..3 + dice.roll(5) {
                disk.add(dice);
            }
        }
        if dice.once_in(8) {
            disk.move_folder(dice);
        }
        disk
    }

    fn at(&self, name: &str) -> PathBuf {
        self.root.path().join("policy").join(name)
    }

    /// What the configuration names.
    pub(super) fn paths(&self) -> Vec<PathBuf> {
        NAMED.map(|name| self.at(name)).to_vec()
    }

    /// What whoever looks finds.
    pub(super) fn look(&self) -> Sight {
        let name = |name: &str| self.at(name).display().to_string();
        let mut sight = Sight::default();
        let is_away = |file: &str| self.away.is_some_and(|folder| file.starts_with(&format!("{folder}/")));
        if let Some(folder) = self.away {
            sight.hidden.push((name(folder), true, NAMED.contains(&folder)));
        }
        if !self.files.contains_key("single.yaml") {
            sight.hidden.push((name("single.yaml"), true, true));
        }
        for (file, content) in self.files.iter().filter(|(file, _)| !is_away(file)) {
            let look = match content {
                Content::LinkToNothing => {
                    let named = NAMED.contains(file);
                    sight.hidden.push((name(file), named, named));
                    continue;
                }
                Content::Docs(docs) if docs.is_empty() && is_yaml(file) => Look::Blank,
                Content::Docs(docs) => Look::Docs(docs.clone()),
                Content::Cut(text) => Look::Cut(text.clone()),
                Content::NotYaml | Content::NotUtf8 => Look::Unreadable,
                Content::Blank(_) => Look::Blank,
                Content::Nothing => Look::Nothing,
            };
            sight.files.insert(name(file), look);
        }
        sight
    }

    /// Changes something; `known` are objects that are in force, which another file may come to have. Says what class of change it was.
    pub(super) fn change(&mut self, dice: &mut Dice, known: &BTreeSet<Id>) -> &'static str {
        loop {
            let class = match dice.roll(22) {
                0 | 1 => self.add(dice),
                2 => self.remove(dice),
                3 => self.rename(dice),
                4 => self.swap(dice),
                5 => self.put(dice, |_, _| Some((Content::Blank(""), "files: blanked"))),
                6 => self.put(dice, |_, _| Some((Content::Blank("\n  # nothing yet\n"), "files: blanked"))),
                7 => self.put(dice, |_, _| Some((Content::NotYaml, "files: not YAML"))),
                8 => self.put(dice, |_, _| Some((Content::NotUtf8, "files: not UTF-8"))),
                9 => self.put(dice, |_, _| Some((Content::Nothing, "files: emptied to a list of nothing"))),
                10 => self.put(dice, |_, _| Some((Content::LinkToNothing, "files: link to nothing"))),
                11 => self.cut(dice),
                12 => self.move_folder(dice),
                13 if dice.once_in(3) => self.remove_all(),
                14 => self.mend(dice, known),
                15 => self.move_object(dice, known, false),
                16 => self.move_object(dice, known, true),
                17 => self.edit(dice, Some(Fault::Wrong), "objects: wrong"),
                18 => self.edit(dice, Some(Fault::Contradiction), "objects: contradiction"),
                19 => self.edit(dice, None, "objects: removed"),
                20 => self.put(dice, |content, _| Some((content.clone(), "files: rewritten the same"))),
                _ => self.edit(dice, Some(Fault::None), "files: edited"),
            };
            if let Some(class) = class {
                return class;
            }
        }
    }

    /// The files that can be written to now.
    fn visible(&self) -> Vec<&'static str> {
        let is_away = |file: &str| self.away.is_some_and(|folder| file.starts_with(&format!("{folder}/")));
        self.files.keys().copied().filter(|file| !is_away(file)).collect()
    }

    /// Objects that no file has, wherever it is.
    fn free(&self) -> Vec<Id> {
        let docs = self.files.values().flat_map(|content| match content {
            Content::Docs(docs) => docs.iter().map(|doc| doc.id).collect(),
            // What a cut text has may be any part of it, and isn't given to others.
            Content::Cut(text) => (0..TENANTS)
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
            Content::Cut(text) => fs::write(path, text).unwrap(),
            Content::NotYaml => fs::write(path, "kind: [unclosed\nitems: }").unwrap(),
            Content::NotUtf8 => fs::write(path, [0x6b, 0xff, 0xfe]).unwrap(),
            Content::Blank(text) => fs::write(path, text).unwrap(),
            Content::Nothing => fs::write(path, "apiVersion: v1\nitems: []\nkind: List\n").unwrap(),
            Content::LinkToNothing => symlink("/nonexistent/manifest", path).unwrap(),
        }
        self.files.insert(file, content);
    }

    /// A file with some objects that no other one has, though one may have had them.
    fn add(&mut self, dice: &mut Dice) -> Option<&'static str> {
        let is_away = |file: &&str| self.away.is_some_and(|folder| file.starts_with(&format!("{folder}/")));
        let names: Vec<_> = FILES.into_iter().filter(|file| !self.files.contains_key(file) && !is_away(file)).collect();
        let name = *names.get(dice.roll(names.len().max(1)))?;
        let docs = self.some(dice)?;
        self.write(name, Content::Docs(docs));
        Some("files: added")
    }

    /// A few objects that no file has, of tenants as a whole more often than not.
    fn some(&self, dice: &mut Dice) -> Option<Vec<Doc>> {
        let free = self.free();
        let mut docs: Vec<Doc> = Vec::new();
        for _ in 0..=dice.roll(2) {
            let (n, _) = *free.get(dice.roll(free.len().max(1)))?;
            for id in [(n, true), (n, false)] {
                let is_new = docs.iter().all(|doc| doc.id != id);
                if free.contains(&id) && is_new && !dice.once_in(6) {
                    docs.push(Doc { id, value: dice.roll(4) as u8, fault: Fault::None });
                }
            }
        }
        (!docs.is_empty()).then_some(docs)
    }

    fn pick(&self, dice: &mut Dice) -> Option<&'static str> {
        let files = self.visible();
        files.get(dice.roll(files.len().max(1))).copied()
    }

    fn put(
        &mut self,
        dice: &mut Dice,
        make: impl FnOnce(&Content, &mut Dice) -> Option<(Content, &'static str)>,
    ) -> Option<&'static str> {
        let file = self.pick(dice)?;
        let (content, class) = make(&self.files[file], dice)?;
        self.write(file, content);
        Some(class)
    }

    fn remove(&mut self, dice: &mut Dice) -> Option<&'static str> {
        let file = self.pick(dice)?;
        fs::remove_file(self.at(file)).unwrap();
        self.files.remove(file);
        Some("files: removed")
    }

    #[expect(clippy::unnecessary_wraps, reason = "as all changes, of which others may not be possible")]
    fn remove_all(&mut self) -> Option<&'static str> {
        for file in self.visible() {
            fs::remove_file(self.at(file)).unwrap();
            self.files.remove(file);
        }
        Some("files: all removed")
    }

    fn rename(&mut self, dice: &mut Dice) -> Option<&'static str> {
        let (from, to) = (self.pick(dice)?, FILES[dice.roll(FILES.len())]);
        let is_away = self.away.is_some_and(|folder| to.starts_with(&format!("{folder}/")));
        // Another extension would be another way to write it.
        if is_away || self.files.contains_key(to) || is_yaml(from) != is_yaml(to) {
            return None;
        }
        fs::rename(self.at(from), self.at(to)).unwrap();
        let content = self.files.remove(from)?;
        self.files.insert(to, content);
        Some("files: renamed")
    }

    /// Two files change places.
    fn swap(&mut self, dice: &mut Dice) -> Option<&'static str> {
        let (one, other) = (self.pick(dice)?, self.pick(dice)?);
        if one == other || is_yaml(one) != is_yaml(other) {
            return None;
        }
        let (first, second) = (self.files.remove(one)?, self.files.remove(other)?);
        self.write(one, second);
        self.write(other, first);
        Some("files: swapped")
    }

    /// A text ends at any byte.
    fn cut(&mut self, dice: &mut Dice) -> Option<&'static str> {
        let file = self.pick(dice)?;
        let Content::Docs(docs) = &self.files[file] else { return None };
        let mut text = text(file, docs);
        text.truncate(dice.roll(text.len().max(1)));
        self.write(file, Content::Cut(text));
        Some("files: cut")
    }

    /// A file that was no good has objects again.
    fn mend(&mut self, dice: &mut Dice, known: &BTreeSet<Id>) -> Option<&'static str> {
        let file = self.pick(dice)?;
        if matches!(self.files[file], Content::Docs(_)) {
            return None;
        }
        let before = self.files.insert(file, Content::Nothing)?;
        let Some(mut docs) = self.some(dice) else {
            self.files.insert(file, before);
            return None;
        };
        let free = self.free();
        docs.extend(known.iter().filter(|id| free.contains(id)).take(2).map(|id| Doc {
            id: *id,
            value: 3,
            fault: Fault::None,
        }));
        docs.sort_by_key(|doc| doc.id);
        docs.dedup_by_key(|doc| doc.id);
        self.write(file, Content::Docs(docs));
        Some("files: mended")
    }

    /// An object, or all of a tenant, goes from where it was last good to another file.
    fn move_object(&mut self, dice: &mut Dice, known: &BTreeSet<Id>, whole: bool) -> Option<&'static str> {
        let known: Vec<Id> = known.iter().copied().collect();
        let id = *known.get(dice.roll(known.len().max(1)))?;
        let ids = if whole { vec![(id.0, false), (id.0, true)] } else { vec![id] };
        let to = self.pick(dice)?;
        let visible = self.visible();
        let has =
            |content: &Content| matches!(content, Content::Docs(docs) if docs.iter().any(|doc| ids.contains(&doc.id)));
        let holders: Vec<_> = self.files.iter().filter(|(_, content)| has(content)).map(|(file, _)| *file).collect();
        if holders.iter().any(|file| *file == to || !visible.contains(file)) {
            return None;
        }
        let mut moved = Vec::new();
        for file in holders {
            let Content::Docs(docs) = self.files[file].clone() else { continue };
            let (go, stay): (Vec<Doc>, Vec<Doc>) = docs.into_iter().partition(|doc| ids.contains(&doc.id));
            moved.extend(go);
            self.write(file, Content::Docs(stay));
        }
        let free = self.free();
        // Of files that can't be read, what they had before.
        let missing =
            ids.iter().filter(|id| known.contains(id) && moved.iter().all(|doc| doc.id != **id) && free.contains(id));
        let missing: Vec<Doc> =
            missing.map(|id| Doc { id: *id, value: dice.roll(4) as u8, fault: Fault::None }).collect();
        moved.extend(missing);
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

    /// An object of a file changes, goes wrong, or goes; or one comes.
    fn edit(&mut self, dice: &mut Dice, fault: Option<Fault>, class: &'static str) -> Option<&'static str> {
        let file = self.pick(dice)?;
        let Content::Docs(mut docs) = self.files[file].clone() else { return None };
        let at = dice.roll(docs.len().max(1));
        match fault {
            None => drop((!docs.is_empty()).then(|| docs.remove(at))?),
            Some(Fault::None) if dice.once_in(3) => {
                docs.extend(self.some(dice)?);
                self.write(file, Content::Docs(docs));
                return Some("objects: added");
            }
            Some(fault) => {
                let doc = docs.get_mut(at)?;
                if fault == Fault::Contradiction && !doc.id.1 {
                    return None;
                }
                (doc.fault, doc.value) = (fault, dice.roll(4) as u8);
            }
        }
        self.write(file, Content::Docs(docs));
        Some(class)
    }

    /// A folder goes, with all that is in it, or is back.
    #[expect(clippy::unnecessary_wraps, reason = "as all changes, of which others may not be possible")]
    fn move_folder(&mut self, dice: &mut Dice) -> Option<&'static str> {
        let aside = self.root.path().join("aside");
        if let Some(folder) = self.away.take() {
            fs::rename(aside, self.at(folder)).unwrap();
            return Some("folders: back");
        }
        let folder = FOLDERS[dice.roll(FOLDERS.len())];
        fs::rename(self.at(folder), aside).unwrap();
        let is_all = self.files.keys().all(|file| file.starts_with(&format!("{folder}/")));
        self.away = Some(folder);
        Some(if is_all && !self.files.is_empty() { "folders: missing, the only ones" } else { "folders: missing" })
    }
}
