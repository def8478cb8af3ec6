//! What a key says of its value: the kind, namespace and name of the one object in it.

use crate::manifest::{DEFAULT_NAMESPACE, Kind};
use crate::yaml::{Node, read};

/// Why a manifest isn't what its key (behind the prefix) says; none where it is, or where the key names no kind. What is wrong with
/// a manifest that can't be read shows when it is read.
pub(super) fn conflict(key: &str, text: &str) -> Option<String> {
    let (kind, place) = key.split_once('/')?;
    let kind = Kind::ALL.into_iter().find(|it| it.as_str() == kind)?;
    let place = match place.split('/').collect::<Vec<_>>()[..] {
        [namespace, name] if kind.is_namespaced() => (namespace, name),
        ["", name] | [name] if !kind.is_namespaced() => ("", name),
        _ => return None,
    };
    let (documents, faults) = read(text);
    let document = match &documents[..] {
        [document] => document,
        [] => return None,
        _ if !faults.is_empty() => return None,
        several => {
            return Some(format!("the key is of one {}, but its value has {} documents", kind.as_str(), several.len()));
        }
    };
    let written = object(document)?;
    let named = (kind.as_str(), place.0, place.1);
    let shown = |(kind, namespace, name): (&str, &str, &str)| match namespace {
        "" => format!("{kind} {name}"),
        _ => format!("{kind} {namespace}/{name}"),
    };
    (named != written).then(|| {
        format!("the key is of {}, but the manifest is {}: put it where its name says", shown(named), shown(written))
    })
}

/// Kind, namespace and name of a document, if it has them.
fn object(document: &Node) -> Option<(&str, &str, &str)> {
    let (kind, metadata) = (document.text("kind")?, document.get("metadata"));
    let of = |field: &str| metadata.and_then(|metadata| metadata.text(field));
    // A list has no name of its own.
    let name = of("name").or_else(|| document.get("items").map(|_| ""))?;
    let is_namespaced = Kind::ALL.into_iter().find(|it| it.as_str() == kind).is_some_and(Kind::is_namespaced);
    let namespace = if is_namespaced { of("namespace").unwrap_or(DEFAULT_NAMESPACE) } else { "" };
    Some((kind, namespace, name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_and_its_manifest_name_the_same_object() {
        let service = |metadata: &str| format!("apiVersion: v1\nkind: Service\nmetadata: {metadata}\n");
        let own = service("{name: api, namespace: t}");
        for (key, text) in [
            ("Service/t/api", &own),
            ("Service/default/api", &service("{name: api}")),
            ("Namespace/t", &"apiVersion: v1\nkind: Namespace\nmetadata: {name: t}\n".to_owned()),
            // What names nothing contradicts nothing, and what can't be read shows elsewhere.
            ("dump", &own),
            ("Service/api", &own),
            ("Secret/t/other", &own),
            ("Service/t/other", &"1".to_owned()),
            ("Service/t/other", &"a: [".to_owned()),
            ("Service/t/other", &String::new()),
        ] {
            assert_eq!(conflict(key, text), None, "{key}: {text}");
        }
        for (key, text, both) in [
            ("Service/t/web", &own, ["Service t/web", "Service t/api"]),
            ("Service/u/api", &own, ["Service u/api", "Service t/api"]),
            ("EgressPolicy/t/api", &own, ["EgressPolicy t/api", "Service t/api"]),
            ("Service/t/api", &service("{name: api}"), ["Service t/api", "Service default/api"]),
            ("Namespace/u", &"kind: Namespace\nmetadata: {name: t}\n".to_owned(), ["Namespace u", "Namespace t"]),
            ("Service/t/api", &format!("{own}---\n{own}"), ["one Service", "2 documents"]),
            ("Service/t/api", &"kind: List\nitems: []\n".to_owned(), ["Service t/api", "List"]),
        ] {
            let reason = conflict(key, text).unwrap_or_else(|| panic!("{key}: {text}"));
            assert!(both.iter().all(|name| reason.contains(name)), "{reason}");
        }
    }
}
