//! Key layout: kind/namespace/name of the one object in the value. A kind may have its former name in both.

use vipgate_policy::manifest::{DEFAULT_NAMESPACE, Kind};
use vipgate_policy::yaml::{Node, read};

/// Checks a manifest against its key without the prefix: the reason of a mismatch; `None` if they match or the key
/// names no kind. Invalid manifests are reported when they are parsed.
pub(super) fn mismatch(key: &str, text: &str) -> Option<String> {
    let (kind, path) = key.split_once('/')?;
    let kind = Kind::named(kind)?;
    let (namespace, name) = match path.split('/').collect::<Vec<_>>()[..] {
        [namespace, name] if kind.is_namespaced() => (namespace, name),
        ["", name] | [name] if !kind.is_namespaced() => ("", name),
        _ => return None,
    };
    let (documents, errors) = read(text);
    let document = match &documents[..] {
        [document] => document,
        [] => return None,
        _ if !errors.is_empty() => return None,
        several => {
            return Some(format!("the key names one {}, but its value has {} documents", kind.as_str(), several.len()));
        }
    };
    let actual = object(document)?;
    let expected = (kind.as_str(), namespace, name);
    let show = |(kind, namespace, name): (&str, &str, &str)| match namespace {
        "" => format!("{kind} {name}"),
        _ => format!("{kind} {namespace}/{name}"),
    };
    (expected != actual).then(|| {
        format!("the key names {}, but the manifest is {}: use the key of its name", show(expected), show(actual))
    })
}

/// Kind, namespace and name of a document, if it has them.
fn object(document: &Node) -> Option<(&str, &str, &str)> {
    let (kind_name, metadata) = (document.text("kind")?, document.get("metadata"));
    let kind = Kind::named(kind_name);
    let get = |field: &str| metadata.and_then(|metadata| metadata.text(field));
    // A List has no name.
    let name = get("name").or_else(|| document.get("items").map(|_| ""))?;
    let is_namespaced = kind.is_some_and(Kind::is_namespaced);
    let namespace = if is_namespaced { get("namespace").unwrap_or(DEFAULT_NAMESPACE) } else { "" };
    Some((kind.map_or(kind_name, |kind| kind.as_str()), namespace, name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_must_match_the_object_of_its_manifest() {
        let service = |metadata: &str| format!("apiVersion: v1\nkind: Service\nmetadata: {metadata}\n");
        let own = service("{name: api, namespace: t}");
        let gateway = |kind: &str| format!("apiVersion: vipgate.io/v1alpha1\nkind: {kind}\nmetadata: {{name: gw-a}}\n");
        for (key, text) in [
            ("Service/t/api", &own),
            ("Service/default/api", &service("{name: api}")),
            ("Namespace/t", &"apiVersion: v1\nkind: Namespace\nmetadata: {name: t}\n".to_owned()),
            ("VipGateway/gw-a", &gateway("Gateway")),
            ("Gateway/gw-a", &gateway("VipGateway")),
            ("Gateway/gw-a", &gateway("Gateway")),
            ("VipGateway/gw-a", &gateway("VipGateway")),
            // Not checked: keys without kind, namespace and name, and unreadable manifests.
            ("dump", &own),
            ("Service/api", &own),
            ("Secret/t/other", &own),
            ("Service/t/other", &"1".to_owned()),
            ("Service/t/other", &"a: [".to_owned()),
            ("Service/t/other", &String::new()),
        ] {
            assert_eq!(mismatch(key, text), None, "{key}: {text}");
        }
        for (key, text, both) in [
            ("Service/t/web", &own, ["Service t/web", "Service t/api"]),
            ("Service/u/api", &own, ["Service u/api", "Service t/api"]),
            ("EgressPolicy/t/api", &own, ["EgressPolicy t/api", "Service t/api"]),
            ("Service/t/api", &service("{name: api}"), ["Service t/api", "Service default/api"]),
            ("Namespace/u", &"kind: Namespace\nmetadata: {name: t}\n".to_owned(), ["Namespace u", "Namespace t"]),
            ("Gateway/gw-b", &gateway("Gateway"), ["VipGateway gw-b", "VipGateway gw-a"]),
            ("Service/t/api", &format!("{own}---\n{own}"), ["one Service", "2 documents"]),
            ("Service/t/api", &"kind: List\nitems: []\n".to_owned(), ["Service t/api", "List"]),
        ] {
            let reason = mismatch(key, text).unwrap_or_else(|| panic!("{key}: {text}"));
            assert!(both.iter().all(|name| reason.contains(name)), "{reason}");
        }
    }
}
