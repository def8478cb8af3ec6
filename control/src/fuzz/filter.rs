//! Fuzzing of capture filters, as text and as JSON.

use super::network;
use crate::admin::capture_filter::{Expression, compile, parse};

/// Parses the input as filter text, and decodes it as a filter in JSON.
pub fn filter(data: &[u8]) {
    let network = network();
    if let Ok(text) = std::str::from_utf8(data)
        && let Ok(filter) = parse(text)
    {
        let printed = to_text(&filter);
        assert_eq!(parse(&printed).as_ref(), Ok(&filter), "{text:?} is printed as {printed:?}");
        let (first, second) = (compile(&filter, &network), compile(&filter, &network));
        assert_eq!(format!("{first:?}"), format!("{second:?}"));
        // Every valid filter compiles, unless it names an interface, which may not exist.
        assert!(first.is_ok() || filter.interface.is_some(), "{text:?}: {first:?}");
    }
    if let Ok(filter) = serde_json::from_slice::<Expression>(data)
        && let Ok(compiled) = compile(&filter, &network)
    {
        assert_eq!(compiled.nets.len(), filter.nets.len());
        // Printed and parsed, it compiles to the same filter.
        let again = parse(&to_text(&filter)).map(|again| compile(&again, &network));
        assert_eq!(format!("{again:?}"), format!("Ok(Ok({compiled:?}))"), "{filter:?}");
    }
}

/// The text form of a filter.
fn to_text(filter: &Expression) -> String {
    let Expression { nets, port, protocol, interface, outcome } = filter;
    let mut words: Vec<String> = nets.iter().map(|net| format!("net {net}")).collect();
    words.extend(port.map(|port| format!("port {port}")));
    words.extend(protocol.map(|protocol| format!("proto {protocol}")));
    words.extend(interface.as_ref().map(|interface| format!("in {interface}")));
    words.extend(outcome.clone());
    words.join(" and ")
}
