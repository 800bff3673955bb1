//! Metadata of a GGUF file, read where it lies.

use std::path::Path;

use super::ValueType;
use super::header::Entry;
use crate::load::error::LoadError;

/// Why reading a checked value cannot fail.
const CHECKED: &str = "the header was checked when it was opened, and a mapped file does not change";

/// The metadata of a model. Getters name the key in their errors: [`LoadError::MissingMetadata`],
/// [`LoadError::WrongType`].
#[derive(Clone, Copy, Debug)]
pub struct Metadata<'a> {
    /// Sorted by key.
    pub(super) entries: &'a [Entry],
    pub(super) bytes: &'a [u8],
    pub(super) path: &'a Path,
}

/// One metadata value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value<'a> {
    /// An unsigned integer of any width.
    Unsigned(u64),
    /// A signed integer of any width.
    Signed(i64),
    /// A 32-bit float.
    F32(f32),
    /// A 64-bit float.
    F64(f64),
    /// A boolean.
    Bool(bool),
    /// A string.
    Str(&'a str),
    /// Values of one type.
    Array(Array<'a>),
}

/// An array of metadata values, none of them an array.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Array<'a> {
    element: ValueType,
    len: usize,
    bytes: &'a [u8],
}

/// An array of strings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StrArray<'a>(Array<'a>);

impl<'a> Metadata<'a> {
    /// The path that messages name.
    pub fn path(&self) -> &'a Path {
        self.path
    }

    /// Every entry, by key.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&'a str, Value<'a>)> + use<'a> {
        let bytes = self.bytes;
        self.entries.iter().map(move |entry| (str::from_utf8(entry.key(bytes)).expect(CHECKED), value(entry, bytes)))
    }

    /// The value of a key, of whatever type; `None` where the key is absent.
    pub fn get(&self, key: &str) -> Option<Value<'a>> {
        self.entry(key).map(|entry| value(entry, self.bytes))
    }

    /// The type of a key's value; `None` where the key is absent.
    pub fn value_type(&self, key: &str) -> Option<ValueType> {
        self.entry(key).map(|entry| entry.value_type)
    }

    /// An unsigned integer of any width whose value fits; a signed one that is not negative is taken too.
    pub fn get_u32(&self, key: &str) -> Result<u32, LoadError> {
        self.integer(key, "an integer that fits in u32")
    }

    /// As [`Self::get_u32`], for 64 bits.
    pub fn get_u64(&self, key: &str) -> Result<u64, LoadError> {
        self.integer(key, "an integer that fits in u64")
    }

    /// A float of either width, rounded to f32.
    pub fn get_f32(&self, key: &str) -> Result<f32, LoadError> {
        match self.required(key)? {
            Value::F32(x) => Ok(x),
            Value::F64(x) => Ok(x as f32),
            other => Err(self.wrong_type(key, "a float", other)),
        }
    }

    /// A boolean.
    pub fn get_bool(&self, key: &str) -> Result<bool, LoadError> {
        match self.required(key)? {
            Value::Bool(x) => Ok(x),
            other => Err(self.wrong_type(key, "a bool", other)),
        }
    }

    /// A string.
    pub fn get_str(&self, key: &str) -> Result<&'a str, LoadError> {
        match self.required(key)? {
            Value::Str(x) => Ok(x),
            other => Err(self.wrong_type(key, "a string", other)),
        }
    }

    /// An array of strings, not copied.
    pub fn get_str_array(&self, key: &str) -> Result<StrArray<'a>, LoadError> {
        match self.required(key)? {
            Value::Array(array) if array.element == ValueType::Str => Ok(StrArray(array)),
            other => Err(self.wrong_type(key, "an array of strings", other)),
        }
    }

    /// An array of integers that all fit in i32.
    pub fn get_i32_array(&self, key: &str) -> Result<Vec<i32>, LoadError> {
        const WANTED: &str = "an array of integers that fit in i32";
        self.array(key, WANTED, |value| match value {
            Value::Unsigned(x) => i32::try_from(x).ok(),
            Value::Signed(x) => i32::try_from(x).ok(),
            _ => None,
        })
    }

    /// An array of floats of either width, rounded to f32.
    pub fn get_f32_array(&self, key: &str) -> Result<Vec<f32>, LoadError> {
        self.array(key, "an array of floats", |value| match value {
            Value::F32(x) => Some(x),
            Value::F64(x) => Some(x as f32),
            _ => None,
        })
    }

    /// An array of booleans.
    pub fn get_bool_array(&self, key: &str) -> Result<Vec<bool>, LoadError> {
        self.array(key, "an array of bools", |value| match value {
            Value::Bool(x) => Some(x),
            _ => None,
        })
    }

    fn entry(&self, key: &str) -> Option<&'a Entry> {
        let idx = self.entries.binary_search_by(|entry| entry.key(self.bytes).cmp(key.as_bytes())).ok()?;
        Some(&self.entries[idx])
    }

    fn required(&self, key: &str) -> Result<Value<'a>, LoadError> {
        self.get(key).ok_or_else(|| LoadError::MissingMetadata { path: self.path.to_owned(), key: key.to_owned() })
    }

    fn integer<T: TryFrom<u64> + TryFrom<i64>>(&self, key: &str, wanted: &'static str) -> Result<T, LoadError> {
        let value = self.required(key)?;
        let integer = match value {
            Value::Unsigned(x) => T::try_from(x).ok(),
            Value::Signed(x) => T::try_from(x).ok(),
            _ => None,
        };
        integer.ok_or_else(|| self.wrong_type(key, wanted, value))
    }

    fn array<T>(
        &self,
        key: &str,
        wanted: &'static str,
        element: impl Fn(Value<'a>) -> Option<T>,
    ) -> Result<Vec<T>, LoadError> {
        let value = self.required(key)?;
        let Value::Array(array) = value else {
            return Err(self.wrong_type(key, wanted, value));
        };
        array
            .iter()
            .enumerate()
            .map(|(i, value)| {
                element(value).ok_or_else(|| LoadError::WrongType {
                    path: self.path.to_owned(),
                    key: key.to_owned(),
                    wanted,
                    found: format!("an array of {} whose element {i} is {value}", array.element.name()),
                })
            })
            .collect()
    }

    fn wrong_type(&self, key: &str, wanted: &'static str, value: Value<'_>) -> LoadError {
        let type_name = self.entry(key).map_or("", |entry| entry.value_type.name());
        let found = match value {
            Value::Array(array) => format!("an array of {}", array.element.name()),
            Value::Str(_) => "a string".to_owned(),
            other => format!("the {type_name} {other}"),
        };
        LoadError::WrongType { path: self.path.to_owned(), key: key.to_owned(), wanted, found }
    }
}

/// Strings are cut to 60 characters and arrays to their type and length: a value is printed on one line.
impl std::fmt::Display for Value<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unsigned(x) => write!(f, "{x}"),
            Self::Signed(x) => write!(f, "{x}"),
            Self::F32(x) => write!(f, "{x}"),
            Self::F64(x) => write!(f, "{x}"),
            Self::Bool(x) => write!(f, "{x}"),
            Self::Str(x) => match x.char_indices().nth(60) {
                Some((end, _)) => write!(f, "{:?}... ({} bytes)", &x[..end], x.len()),
                None => write!(f, "{x:?}"),
            },
            Self::Array(array) => write!(f, "[{}; {}]", array.element.name(), array.len),
        }
    }
}

impl<'a> Array<'a> {
    /// Type of the elements.
    pub fn element(&self) -> ValueType {
        self.element
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Value<'a>> + use<'a> {
        let (element, mut rest) = (self.element, self.bytes);
        (0..self.len).map(move |_| match element.size() {
            Some(size) => scalar(element, rest.split_off(..size).expect(CHECKED)),
            None => Value::Str(split_str(&mut rest)),
        })
    }
}

impl<'a> StrArray<'a> {
    /// Number of strings.
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// The strings in order; each is found by passing over those before it.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &'a str> + use<'a> {
        let mut rest = self.0.bytes;
        (0..self.0.len).map(move |_| split_str(&mut rest))
    }
}

/// Turns the absence of a metadata entry into `None`; a wrong type stays an error.
pub trait Optional<T> {
    /// `Ok(None)` for [`LoadError::MissingMetadata`].
    fn optional(self) -> Result<Option<T>, LoadError>;
}

impl<T> Optional<T> for Result<T, LoadError> {
    fn optional(self) -> Result<Option<T>, LoadError> {
        match self {
            Ok(value) => Ok(Some(value)),
            Err(error) if error.is_missing_metadata() => Ok(None),
            Err(error) => Err(error),
        }
    }
}

fn value<'a>(entry: &Entry, bytes: &'a [u8]) -> Value<'a> {
    let bytes = entry.value(bytes);
    match (entry.value_type, entry.element) {
        (_, Some((element, len))) => Value::Array(Array { element, len: len as usize, bytes }),
        (ValueType::Str, _) => Value::Str(str::from_utf8(bytes).expect(CHECKED)),
        (value_type, _) => scalar(value_type, bytes),
    }
}

/// Takes a string and its length off the front.
fn split_str<'a>(rest: &mut &'a [u8]) -> &'a str {
    let len = rest.split_off(..8).expect(CHECKED);
    let len = u64::from_le_bytes(len.try_into().expect("8 bytes were taken"));
    str::from_utf8(rest.split_off(..len as usize).expect(CHECKED)).expect(CHECKED)
}

/// A value of fixed size. `bytes` has exactly that size.
fn scalar<'a>(value_type: ValueType, bytes: &[u8]) -> Value<'a> {
    fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
        bytes.try_into().expect(CHECKED)
    }
    match value_type {
        ValueType::U8 => Value::Unsigned(bytes[0].into()),
        ValueType::I8 => Value::Signed(i8::from_le_bytes(array(bytes)).into()),
        ValueType::U16 => Value::Unsigned(u16::from_le_bytes(array(bytes)).into()),
        ValueType::I16 => Value::Signed(i16::from_le_bytes(array(bytes)).into()),
        ValueType::U32 => Value::Unsigned(u32::from_le_bytes(array(bytes)).into()),
        ValueType::I32 => Value::Signed(i32::from_le_bytes(array(bytes)).into()),
        ValueType::U64 => Value::Unsigned(u64::from_le_bytes(array(bytes))),
        ValueType::I64 => Value::Signed(i64::from_le_bytes(array(bytes))),
        ValueType::F32 => Value::F32(f32::from_le_bytes(array(bytes))),
        ValueType::F64 => Value::F64(f64::from_le_bytes(array(bytes))),
        ValueType::Bool => Value::Bool(bytes[0] != 0),
        ValueType::Str | ValueType::Array => unreachable!("strings and arrays have no fixed size"),
    }
}
