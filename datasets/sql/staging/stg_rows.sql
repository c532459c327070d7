-- stg_rows: every row read from a source, normalised, with the rule it breaks when it breaks one.
-- Grain: one row per source row.
--   pool_order     bigint   position of the source among all sources; earlier sources win over later ones
--   benchmark      varchar  name of the benchmark the row is for; null for training rows
--   source         varchar  where it stands in the recipe, and what it is
--   row_number     bigint   1 for the first row of the source (of a JSONL file: the line)
--   question, answer, trace, family   varchar, spaces around them removed; trace is null without one
--   scale          bigint   length of the chain a solver needs; 0 when unknown
--   row_text       varchar  the row as it was read
--   normalised     varchar  question in lower case, every run of white space one space (open-r1)
--   reason         varchar  the rule the row breaks; null for a good row
with normalised as (
    select
        pool_order,
        benchmark,
        source,
        row_number,
        trim(question, e' \t\r\n') as question,
        trim(answer, e' \t\r\n') as answer,
        nullif(trim(trace, e' \t\r\n'), '') as trace,
        family,
        scale,
        row_text,
        unreadable,
        trim(regexp_replace(lower(question), '[\s\x0b\x1c-\x1f\x85\p{Z}]+', ' ', 'g')) as normalised
    from raw_rows
),

final as (
    select
        * exclude (unreadable),
        case
            when unreadable is not null then unreadable
            when normalised is null then 'the question is missing'
            when normalised = '' then 'the question is empty'
            when answer is null then 'the answer is missing'
            when answer = '' then 'the answer is empty'
        end as reason
    from normalised
)

select * from final
