//! "Did you mean": the known word that is nearest to an unknown one.

/// The candidate that `word` was probably meant to be: at most a third of its letters differ, or only its case.
pub(super) fn nearest<'a>(word: &str, candidates: &[&'a str]) -> Option<&'a str> {
    let lower = word.to_lowercase();
    candidates
        .iter()
        .map(|candidate| (distance(&lower, &candidate.to_lowercase()), *candidate))
        .filter(|(distance, candidate)| *distance <= candidate.chars().count().div_ceil(3).min(3))
        .min()
        .map(|(_, candidate)| candidate)
}

/// Letters to insert, remove or replace to make one word of the other.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_word_is_found_and_a_strange_one_is_not() {
        let known = ["name", "node", "zone", "interfaces", "serviceRef"];
        assert_eq!(nearest("interface", &known), Some("interfaces"));
        assert_eq!(nearest("serviceref", &known), Some("serviceRef"));
        assert_eq!(nearest("nmae", &known), Some("name"));
        assert_eq!(nearest("cores", &known), None);
        assert_eq!((distance("kitten", "sitting"), distance("", "abc")), (3, 3));
    }
}
